"""What routing knows of prompts that are tokenized elsewhere."""

from __future__ import annotations

import pytest

from cache.prompt_links import prompt_links, token_bytes_of
from gateway.remote.body import read_body
from gateway.remote.model import RemoteModel, make_remote_model
from gateway.remote.prompt import canonical_text, routed_prompt
from tests.gateway.fakes import ByteTokenizer, RoleTemplate
from tests.gateway.remote.remote_stage import SECRET, chat, staged
from tests.gateway.remote.upstream import Upstream, streams

ROOT = b"r" * 16
LONG = "The quick brown fox jumps over the lazy dog. " * 20


def model(tokenizer=None, template=None) -> RemoteModel:
    return make_remote_model("m", None, SECRET, 1, tokenizer=tokenizer, chat_template=template)


def with_tokenizer() -> RemoteModel:
    return model(ByteTokenizer(), RoleTemplate())


async def test_with_a_tokenizer_links_are_those_of_our_own_engines():
    prompt = await routed_prompt(read_body(chat(LONG), "chat"), with_tokenizer(), ROOT)
    ids = RoleTemplate().encode([{"role": "user", "content": LONG}])
    assert prompt.exact
    assert prompt.tokens == len(ids)
    for size in (16, 32):
        expected = prompt_links(ROOT, token_bytes_of(ids), block_tokens=size)
        assert list(prompt.prefix.of(size)) == list(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"thinking": True}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
async def test_what_is_rendered_in_unknown_ways_is_followed_by_its_text(fields):
    body = read_body({**chat(LONG), **fields}, "chat")
    prompt = await routed_prompt(body, with_tokenizer(), ROOT)
    assert not prompt.exact


async def test_a_longer_conversation_begins_with_the_shorter_ones_links():
    short = chat(LONG)["messages"]
    longer = [*short, {"role": "assistant", "content": LONG}, {"role": "user", "content": "?"}]
    links = [
        list((await routed_prompt(_chat(turns), model(), ROOT)).prefix.of(16))
        for turns in (short, longer)
    ]
    assert links[0]
    assert len(links[1]) > len(links[0])
    assert links[1][: len(links[0])] == links[0]
    twice = (await routed_prompt(_chat(short), model(), ROOT)).prefix
    assert list(twice.of(32)) == links[0][1::2]


def test_fields_cannot_run_into_each_other():
    texts = {
        canonical_text(_chat([{"role": "user", "content": "ab"}])),
        canonical_text(_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])),
        canonical_text(read_body(chat("ab", tools=[1]), "chat")),
    }
    assert len(texts) == 3


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [([1, 2, 3], 3), ("abc", 3), (["abc", "other"], 5), ([[1, 2, 3], [4]], 4)],
)
async def test_prompts_of_completions(prompt, tokens):
    body = read_body({"model": "m", "prompt": prompt}, "completions")
    routed = await routed_prompt(body, with_tokenizer(), ROOT)
    assert (routed.exact, routed.tokens) == (True, tokens)
    assert (await routed_prompt(body, model(), ROOT)).exact is False


async def test_ids_that_the_tokenizer_does_not_have_are_text():
    body = read_body({"model": "m", "prompt": [1, 10**9]}, "completions")
    assert not (await routed_prompt(body, with_tokenizer(), ROOT)).exact


async def test_who_shares_with_nobody_has_no_links():
    for served in (model(), with_tokenizer()):
        prompt = await routed_prompt(read_body(chat(LONG), "chat"), served, None)
        assert not prompt.prefix.of(16)


async def test_a_prefix_goes_where_it_was_and_what_was_not_served_is_forgotten():
    body = chat(LONG, stream=True)
    upstreams = [Upstream([streams("a b", cached=18)]) for _ in range(3)]
    async with staged(*upstreams) as stage:
        for _ in range(4):
            await stage.post(body)
        used = {receipt.candidate.name for receipt in stage.observer.receipts}
        assert len(used) == 1
        assert stage.observer.receipts[-1].candidate.cached.tokens > 0
        for upstream in upstreams:
            upstream.scripts = [streams("a b", cached=0)]
        before = stage.observer.receipts[-1].candidate.cached.tokens
        await stage.post(body)
        await stage.post(body)
        assert stage.observer.receipts[-1].served_tokens == 0
        assert before > 0


def _chat(messages: list[dict]):
    return read_body({"model": "m", "messages": messages}, "chat")
