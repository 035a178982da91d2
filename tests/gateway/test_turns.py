"""Which message a token belongs to, under the shapes of template that models come with."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from gateway.served_model import ServedModel
from gateway.turns import Place, locate, turn_openers
from tests.engine.checkpoints import byte_tokenizer_definition
from tests.gateway.fakes import ScriptedReplica

NOW = datetime(2026, 3, 4, tzinfo=UTC)
CONTROLS = (
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "[INST]",
    "[/INST]",
    "</s>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "<|header|>",
    "<|header_end|>",
    "<|eot|>",
)
GENERATION = "{% if add_generation_prompt %}{{ 'OPENING' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}" + GENERATION.replace("OPENING", "<|im_start|>assistant\n")
)
WITH_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}"
    "{% endif %}" + CHATML
)
HEADERS = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|header|>' + m.role + '<|header_end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    + GENERATION.replace("OPENING", "<|header|>assistant<|header_end|>\n\n")
)
BY_ROLE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
    "{% endfor %}" + GENERATION.replace("OPENING", "<|assistant|>\n")
)
JOINED = (
    "{% for m in messages %}{% if not loop.first %}{{ '\n\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    + GENERATION.replace("OPENING", "\n\n<|im_start|>assistant\n")
)
INST = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '</s>' }}"
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
REFUSING = "{{ raise_exception('no') }}"


def model_of(source: str | None) -> ServedModel:
    definition = byte_tokenizer_definition()
    known = len(definition["model"]["vocab"])
    first = definition["added_tokens"][0]
    for i, text in enumerate(CONTROLS[3:]):
        definition["added_tokens"].append({**first, "id": known + i, "content": text})
    tokenizer = Tokenizer(definition, path=Path("tiny"), named_tokens={})
    template = ChatTemplate(source, tokenizer) if source is not None else None
    return ServedModel("m", tokenizer, template, 4096, ScriptedReplica(), "f" * 64, 0)


MODELS = {
    name: model_of(source)
    for name, source in {
        "chatml": CHATML,
        "default system": WITH_DEFAULT_SYSTEM,
        "headers": HEADERS,
        "by role": BY_ROLE,
        "joined": JOINED,
    }.items()
}
OPENERS = {name: turn_openers(model) for name, model in MODELS.items()}


def opening_of(model: ServedModel, messages: list[dict[str, Any]], count: int) -> int:
    """Where message `count` begins, found by rendering the ones before it."""
    assert model.chat_template is not None
    whole = model.chat_template.encode(messages, now=NOW)
    shorter = model.chat_template.encode(messages[:count], now=NOW, add_generation_prompt=False)
    assert whole[: len(shorter)] == shorter
    at = len(shorter)
    while not model.tokenizer.is_control(whole[at]):
        at += 1  # what stands between two turns belongs to the earlier one
    return at


@pytest.mark.parametrize("name", MODELS)
@given(
    contents=st.lists(
        st.lists(st.sampled_from(["a", " é", "\n", "<|im_start|>", "<|user|>"]), max_size=8).map(
            "".join
        ),
        min_size=2,
        max_size=6,
    ),
    system=st.booleans(),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_a_message_begins_where_rendering_says(
    name: str, contents: list[str], system: bool, data: st.DataObject
) -> None:
    model = MODELS[name]
    roles = [("user", "assistant")[i % 2] for i in range(len(contents))]
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    if system:
        messages.insert(0, {"role": "system", "content": "be brief"})
    assert model.chat_template is not None
    ids = model.chat_template.encode(messages, now=NOW)
    wanted = data.draw(st.integers(1, len(messages) - 1))
    start = opening_of(model, messages, wanted)
    end = opening_of(model, messages, wanted + 1)
    for position in {start, start + 1, end - 1}:
        place = locate(ids, position, len(messages), OPENERS[name])
        assert place == Place(wanted, position - start)
    assert locate(ids, start - 1, len(messages), OPENERS[name]) != Place(wanted, 0)


def test_the_first_message_and_what_the_template_puts_before_it() -> None:
    model, openers = MODELS["default system"], OPENERS["default system"]
    assert model.chat_template is not None
    messages = [{"role": "user", "content": "hello"}]
    ids = model.chat_template.encode(messages, now=NOW)
    start = [i for i, token in enumerate(ids) if token in openers][1]
    assert locate(ids, start + 3, 1, openers) == Place(0, 3)
    assert locate(ids, start - 1, 1, openers) == Place(None, start - 1)
    assert locate(ids, 0, 1, openers) == Place(None, 0)


def test_the_opening_of_the_answer_is_nobodys_message() -> None:
    model, openers = MODELS["chatml"], OPENERS["chatml"]
    assert model.chat_template is not None
    ids = model.chat_template.encode([{"role": "user", "content": "hello"}], now=NOW)
    assert locate(ids, len(ids) - 1, 1, openers) is None


@pytest.mark.parametrize("source", [INST, PLAIN, REFUSING, None])
def test_templates_that_do_not_open_every_turn_give_no_answer(source: str | None) -> None:
    assert turn_openers(model_of(source)) == frozenset()
    assert locate([1, 2, 3], 1, 1, frozenset()) is None


@pytest.mark.parametrize("messages", [1, 2, 3, 7, 8])
def test_turns_that_do_not_add_up_give_no_answer(messages: int) -> None:
    opener = 1
    ids = [opener, 5, 5] * 6
    place = locate(ids, 4, messages, frozenset({opener}))
    assert (place is None) == (messages not in (4, 5, 6))


@pytest.mark.parametrize("position", [-1, 3, 100])
def test_a_position_outside_the_prompt_is_nowhere(position: int) -> None:
    assert locate([1, 2, 1], position, 1, frozenset({1})) is None
