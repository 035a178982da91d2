"""Readers: what files say, and what they complain of."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from loadtest.plan import SOLE_TENANT
from loadtest.traces.description import describe
from loadtest.traces.lines import TraceError
from loadtest.traces.own import read_chats
from loadtest.traces.reading import SHIPPED, read_trace

_MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1030, "output_length": 7, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 6000, "input_length": 600, "output_length": 1, "hash_ids": [0, 9]}\n'
)
_AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,374,44\n"
    "2023-11-16 18:17:04.0319600,396,0\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def _own(**fields: object) -> str:
    said = {"at_s": 0, "prompt_tokens": 40, "output_tokens": 5} | fields
    return str({name: value for name, value in said.items() if value is not ...}).replace("'", '"')


def test_mooncake_lines_are_read(file: Path) -> None:
    file.write_text(_MOONCAKE)

    trace = read_trace(file)

    assert (trace.name, trace.block_tokens) == ("trace.jsonl", 512)
    first, second = trace.requests
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 1030, 7)
    assert list(first.blocks) == [0, 1, 2]
    assert (second.at_s, list(second.blocks)) == (3.0, [0, 3])


def test_a_packed_file_reads_as_the_file(file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(_MOONCAKE.encode()))
    file.write_text(_MOONCAKE)

    assert read_trace(packed).requests == read_trace(file).requests


def test_the_shipped_piece_is_what_its_readme_says() -> None:
    """The counts were taken from the published trace by another program."""
    assert SHIPPED["mooncake"].stat().st_size < 120_000

    found = describe(read_trace("mooncake"))

    assert (found.requests, found.blocks, found.unique_blocks) == (1068, 29_459, 23_185)
    assert found.ideal_hit_rate == pytest.approx(6274 / 29_459)
    assert found.span_s == 351.0
    assert found.rate_rps == pytest.approx(1068 / 351)
    readme = SHIPPED["mooncake"].with_name("README.md").read_text()
    assert "1,068 requests" in readme
    assert "21.3 %" in readme


def test_azure_lines_are_read_to_the_microsecond(file: Path) -> None:
    file.write_text(_AZURE)

    first, second = read_trace(file).requests

    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(0.052, abs=1e-6)
    assert (second.output_tokens, list(second.blocks)) == (0, [])


def test_newer_azure_lines_say_their_time_zone(file: Path) -> None:
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,374,44\n"
        "2024-05-10 01:00:00.250000+01:00,5,6\n"
    )

    assert [request.at_s for request in read_trace(file).requests] == [0.0, 0.25]


def test_own_lines_are_read_in_order_of_arrival(file: Path) -> None:
    lines = [
        _own(at_s=12.5, tenant="late"),
        _own(at_s=..., timestamp_ms=10_500, blocks=["a", "b", "c"], block_tokens=16),
        _own(at_s=11, blocks=["a", "b"], block_tokens=16, tenant="late"),
        _own(at_s=11.5, blocks=["z", "b"], block_tokens=16),
    ]
    file.write_text("\n\n".join(lines))

    trace = read_trace(file)

    assert [request.at_s for request in trace.requests] == [0.0, 0.5, 1.0, 2.0]
    assert trace.block_tokens == 16
    blocks = [list(request.blocks) for request in trace.requests]
    # a tail without id is nobody's; "b" behind something else is another block
    assert blocks == [[0, 1, 2], [0, 1, 3], [4, 5, 6], []]
    assert {tenant.name for tenant in trace.tenants} == {SOLE_TENANT, "late"}


def test_texts_are_read_as_chats_and_as_words(file: Path) -> None:
    lines = [
        '{"at_s": 5, "messages": [{"role": "system", "content": "Be brief."}, '
        '{"role": "user", "content": "Why?"}], "output_tokens": 3, "fields": {"top_p": 0.5}}',
        '{"at_s": 4, "prompt": "Be brief.", "output_tokens": 2}',
    ]
    file.write_text("\n".join(lines))

    load = read_chats(file)
    trace = read_trace(file)

    first, second = load.sessions
    assert (first.start_s, second.start_s) == (0.0, 1.0)
    assert first.turns[0].messages == ({"role": "user", "content": "Be brief."},)
    assert second.turns[0].fields == {"top_p": 0.5}
    # a role, two words and a full stop
    assert trace.requests[0].prompt_tokens == 4
    assert [request.output_tokens for request in trace.requests] == [2, 3]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ": is empty"),
        ("hello\n", ":1: is neither a JSON object nor a header"),
        (_MOONCAKE + "{", ":3: is not JSON"),
        (_MOONCAKE + "[1]", ":3: must be a JSON object"),
        (_MOONCAKE.replace("1030", "1000"), ":1: hash_ids: 3 blocks for 1000 tokens"),
        (_MOONCAKE.replace("1030", "true"), ":1: input_length: must be a whole number"),
        (_MOONCAKE.replace("6000", '"6"'), ":2: timestamp: must be a number"),
        (_MOONCAKE.replace("9]", "9.5]"), ":2: hash_ids: must hold whole numbers or texts only"),
        (_MOONCAKE.replace("[0, 9]", "9"), ":2: hash_ids: must be an array"),
        (_MOONCAKE.replace('"output_length": 1, ', ""), ":2: output_length: is missing"),
        (_AZURE.replace("Generated", "Made"), ":1: GeneratedTokens: no such column"),
        (_AZURE.replace("374", "3_74"), ":2: ContextTokens: must be a whole number"),
        (_AZURE.replace("396,0", "396"), ":3: 2 cells under 3 columns"),
        (_AZURE.replace("2023-11-16", "16.11."), ":2: TIMESTAMP: must be like 2023"),
        (_own(tenat="x"), ":1: tenat: unknown field; known are"),
        (_own(timestamp_ms=1), ":1: at_s or timestamp_ms: exactly one"),
        (_own(prompt_tokens=0), ":1: prompt_tokens: must be a whole number of at least 1"),
        (_own(output_tokens=-1), ":1: output_tokens: must be a whole number of at least 0"),
        (_own(blocks=[1, 2]), ":1: block_tokens: is missing"),
        (_own(blocks=[1], block_tokens=16), ":1: blocks: 1 for 40 tokens"),
        (_own(tenant=""), ":1: tenant: must be text"),
        (_own(fields="x"), ":1: fields: is for lines with messages"),
        (
            _own(block_tokens=16) + "\n" + _own(block_tokens=32),
            ":2: block_tokens: is 16 further up",
        ),
        (_own(prompt="hi"), ":1: prompt_tokens: is for lines without prompt"),
        (_own(prompt_tokens=..., messages=[]), ":1: messages: must not be empty"),
        (_own(prompt_tokens=..., messages=[1]), ":1: messages: must hold objects with a role"),
        (_own(prompt_tokens=..., prompt="a", fields=[]), ":1: fields: must be an object"),
        (
            _own(prompt_tokens=..., prompt="a") + "\n" + _own(),
            ":2: messages or prompt: exactly one",
        ),
    ],
)
def test_what_is_wrong_is_told_by_file_line_and_field(
    file: Path, text: str, complaint: str
) -> None:
    file.write_text(text)

    with pytest.raises(TraceError) as raised:
        read_trace(file)

    assert str(raised.value).startswith(f"{file}{complaint}")


@pytest.mark.parametrize("raw", [b"\xff\xfe\x00", b"\x1f\x8b\x08\x00garbage"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, raw: bytes) -> None:
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(TraceError, match=r"is no text|cannot be read"):
            read_trace(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read \(No such file"):
        read_trace(tmp_path / "none.csv")


def test_an_unknown_format_names_the_known() -> None:
    with pytest.raises(ValueError, match="no format csv; there are auto, mooncake, azure, own"):
        read_trace("mooncake", "csv")


def test_a_format_that_is_given_is_not_guessed(file: Path) -> None:
    file.write_text(_MOONCAKE)

    with pytest.raises(TraceError, match=r":1: hash_ids: unknown field"):
        read_trace(file, "own")
