"""Traces as Mooncake published them (FAST'25): one JSON object a line.

`timestamp` is the arrival in milliseconds, `input_length` and `output_length` are tokens, and
`hash_ids` are the prompt's blocks of 512 tokens, the last of them partly filled.
"""

from __future__ import annotations

from pathlib import Path

from loadtest.trace import Trace, TraceRequest
from loadtest.traces.block_ids import BlockIds, filled
from loadtest.traces.lines import Fields, objects_of

BLOCK_TOKENS = 512
MARK = "input_length"
"""The field by which such a file is known."""


def read_mooncake(path: Path) -> Trace:
    """The requests as they stand in the file; raises TraceError."""
    blocks = BlockIds()
    return Trace(path.name, BLOCK_TOKENS, [_request(each, blocks) for each in objects_of(path)])


def _request(fields: Fields, blocks: BlockIds) -> TraceRequest:
    prompt_tokens = fields.count(MARK, 1)
    ids = fields.ids("hash_ids")
    needed = -(-prompt_tokens // BLOCK_TOKENS)
    if len(ids) != needed:
        raise fields.place.wrong(
            f"hash_ids: {len(ids)} blocks for {prompt_tokens} tokens, which are {needed} of "
            f"{BLOCK_TOKENS}"
        )
    return TraceRequest(
        at_s=fields.number("timestamp") / 1000,
        prompt_tokens=prompt_tokens,
        output_tokens=fields.count("output_length", 0),
        blocks=blocks.of(zip(ids, filled(prompt_tokens, BLOCK_TOKENS), strict=True)),
    )
