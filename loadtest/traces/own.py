"""Traces in forebay's own format, for traffic of one's own: one JSON object a line.

| field | meaning |
| --- | --- |
| `at_s` or `timestamp_ms` | when the request came, from any beginning |
| `prompt_tokens`, `output_tokens` | lengths; `output_tokens` may be 0 |
| `blocks` | ids of the prompt's blocks, numbers or texts; without them nothing is shared |
| `block_tokens` | what a block has, the same in the whole file; needed where there are blocks |
| `tenant` | whose it was |

Two prompts share the leading blocks whose ids are equal. The last block of a prompt may be partly
filled, and may then be left out: nobody shares it.

Instead of `prompt_tokens` and `blocks`, lines may hold what was really asked, all or none of them,
and `output_tokens` is at least 1:

| field | meaning |
| --- | --- |
| `messages` | a chat as the API has it |
| `prompt` | a text, which is sent as a chat of one message |
| `fields` | more fields of the request's body |

Fields of other names are refused: most are slips.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cache.hashing import CHAIN_BLOCK_TOKENS
from loadtest.plan import SOLE_TENANT, Load, Session, TenantPlan, Turn
from loadtest.trace import Trace, TraceRequest
from loadtest.traces.block_ids import BlockIds, filled
from loadtest.traces.chaining import trace_of
from loadtest.traces.lines import Fields, TraceError, objects_of

_TIMES = ("at_s", "timestamp_ms")
_TEXTS = ("messages", "prompt")
_LENGTHS = ("prompt_tokens", "blocks", "block_tokens")
_KNOWN = frozenset({*_TIMES, *_TEXTS, *_LENGTHS, "output_tokens", "tenant", "fields"})


def read_own(path: Path) -> Trace:
    """The requests as they stand in the file; raises TraceError. Of texts, where lines hold those,
    a word counts as a token."""
    lines = [_checked(line) for line in objects_of(path)]
    if any(map(_holds_text, lines)):
        return trace_of(_load(path, lines), CHAIN_BLOCK_TOKENS)
    block_tokens = _block_tokens(lines)
    blocks = BlockIds()
    requests = [_request(line, block_tokens, blocks) for line in lines]
    return Trace(path.name, block_tokens, requests, _tenants(each.tenant for each in requests))


def read_chats(path: Path) -> Load:
    """The texts of such a file, each at its time; raises TraceError if there are none."""
    return _load(path, [_checked(line) for line in objects_of(path)])


def _checked(line: Fields) -> Fields:
    unknown = sorted(line.values.keys() - _KNOWN)
    if unknown:
        raise line.place.wrong(
            f"{unknown[0]}: unknown field; known are {', '.join(sorted(_KNOWN))}"
        )
    return line


def _holds_text(line: Fields) -> bool:
    return any(name in line.values for name in _TEXTS)


def _load(path: Path, lines: Sequence[Fields]) -> Load:
    if not lines:
        raise TraceError(f"{path}: is empty")
    times_s = [_at_s(line) for line in lines]
    first_s = min(times_s)
    sessions = sorted(
        (
            Session((_turn(line),), _tenant(line), at_s - first_s)
            for line, at_s in zip(lines, times_s, strict=True)
        ),
        key=lambda session: session.start_s,
    )
    return Load(path.name, sessions, _tenants(each.tenant for each in sessions))


def _turn(line: Fields) -> Turn:
    name = _one_of(line, _TEXTS)
    for other in _LENGTHS:
        if other in line.values:
            raise line.place.wrong(f"{other}: is for lines without {name}")
    messages = (
        _messages(line)
        if name == "messages"
        else ({"role": "user", "content": line.text("prompt")},)
    )
    return Turn(line.count("output_tokens", 1), messages=messages, fields=_more(line))


def _messages(line: Fields) -> tuple[dict[str, Any], ...]:
    messages = []
    for value in line.array("messages"):
        if not isinstance(value, dict) or not isinstance(value.get("role"), str):
            raise line.place.wrong("messages: must hold objects with a role")
        messages.append(value)
    if not messages:
        raise line.place.wrong("messages: must not be empty")
    return tuple(messages)


def _more(line: Fields) -> dict[str, Any]:
    value = line.values.get("fields", {})
    if not isinstance(value, dict):
        raise line.place.wrong("fields: must be an object")
    return value


def _block_tokens(lines: Sequence[Fields]) -> int:
    """What a block has in the whole file: 16 tokens if it has no blocks."""
    said: int | None = None
    for line in lines:
        if "block_tokens" in line.values:
            here = line.count("block_tokens", 1)
            if said not in (None, here):
                raise line.place.wrong(f"block_tokens: is {said} further up in the file")
            said = here
    return said or CHAIN_BLOCK_TOKENS


def _request(line: Fields, block_tokens: int, blocks: BlockIds) -> TraceRequest:
    if "fields" in line.values:
        raise line.place.wrong("fields: is for lines with messages or a prompt")
    prompt_tokens = line.count("prompt_tokens", 1)
    return TraceRequest(
        at_s=_at_s(line),
        prompt_tokens=prompt_tokens,
        output_tokens=line.count("output_tokens", 0),
        blocks=_blocks(line, prompt_tokens, block_tokens, blocks)
        if "blocks" in line.values
        else (),
        tenant=_tenant(line),
    )


def _blocks(line: Fields, prompt_tokens: int, block_tokens: int, blocks: BlockIds) -> Sequence[int]:
    line.count("block_tokens", 1)
    ids = line.ids("blocks")
    whole, rest = divmod(prompt_tokens, block_tokens)
    if len(ids) not in (whole, whole + (rest > 0)):
        raise line.place.wrong(
            f"blocks: {len(ids)} for {prompt_tokens} tokens, which are {whole} whole ones of "
            f"{block_tokens} and {rest} tokens more"
        )
    keys = zip(ids, filled(prompt_tokens, block_tokens), strict=False)
    return blocks.of(keys, tail=len(ids) == whole and rest > 0)


def _at_s(line: Fields) -> float:
    name = _one_of(line, _TIMES)
    return line.number(name) / (1000 if name == "timestamp_ms" else 1)


def _tenant(line: Fields) -> str:
    return line.text("tenant") if "tenant" in line.values else SOLE_TENANT


def _tenants(names: Iterable[str]) -> tuple[TenantPlan, ...]:
    """In the order of first appearance."""
    return tuple(map(TenantPlan, dict.fromkeys(names)))


def _one_of(line: Fields, names: tuple[str, str]) -> str:
    given = [name for name in names if name in line.values]
    if len(given) != 1:
        raise line.place.wrong(f"{' or '.join(names)}: exactly one of them is needed")
    return given[0]
