"""Whatever a peer started ends with its scope."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from loadtest.peers.process_group import process_group, tail
from tests.loadtest.peers.fake_programs import FAMILY, SLEEP, STUBBORN, python

LONG_S = 30.0


@contextmanager
def family_pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A pipe that every member of a group holds: it ends when the last one has ended."""
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb", buffering=0) as reader,
        os.fdopen(write, "wb", buffering=0) as writer,
    ):
        yield reader, writer


def all_have_ended(reader: IO[bytes], writer: IO[bytes]) -> bool:
    writer.close()
    readable, _, _ = select.select([reader], [], [], 10.0)
    return bool(readable) and reader.read(1) == b""


@pytest.mark.parametrize(
    ("script", "stop_s", "by_itself"),
    [
        (FAMILY + SLEEP, LONG_S, False),
        (STUBBORN, 0.05, False),
        (FAMILY, LONG_S, True),
    ],
    ids=["obeys", "ignores SIGTERM", "leaves its child behind"],
)
def test_the_whole_group_ends(script: str, stop_s: float, by_itself: bool) -> None:
    with family_pipe() as (reader, writer):
        group = process_group(python(script), environment={}, output=writer, stop_s=stop_s)
        with group as process:
            assert reader.read(8) == b"started\n"
            if by_itself:
                assert process.wait(LONG_S) == 0
            else:
                assert process.poll() is None
        assert all_have_ended(reader, writer)
        assert (process.returncode == 0) is by_itself


def test_it_ends_when_the_scope_fails() -> None:
    def fail(reader: IO[bytes]) -> None:
        assert reader.read(8) == b"started\n"
        raise KeyboardInterrupt

    with family_pipe() as (reader, writer):
        command = python(FAMILY + SLEEP)
        group = process_group(command, environment={}, output=writer, stop_s=LONG_S)
        with pytest.raises(KeyboardInterrupt), group:
            fail(reader)
        assert all_have_ended(reader, writer)


def test_a_tail_is_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("one\n\x1b[32mtwo\x1b[0m\nthree\n")
    assert tail(log, 2) == "\n  two\n  three"
