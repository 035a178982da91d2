"""The file in which rows wait."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.ledger.row_text import from_line, storable, to_lines
from gateway.ledger.spool import Spool, SpoolFull, SpoolRoom
from policies.service_class import ServiceClass
from tests.gateway.ledger.rows import row


def drained(spool: Spool, at_once: int = 500) -> tuple[list[str], int]:
    """The ids of all its rows, and how many lines were damaged."""
    ids: list[str] = []
    damaged = 0
    while spool.unread_bytes:
        portion = spool.read(at_once)
        ids += [each.id for each in portion.rows]
        damaged += portion.damaged
        spool.replayed(portion)
    return ids, damaged


def test_rows_come_back_in_order_portion_by_portion(tmp_path: Path) -> None:
    spool = SpoolRoom(tmp_path, most_bytes=1 << 20).make()
    rows = [row() for _ in range(25)]
    spool.append(rows[:10])
    first = spool.read(4)
    assert first.rows == rows[:4]
    assert spool.read(4) == first, "nothing is gone before it is said to be replayed"
    spool.replayed(first)
    spool.append(rows[10:])
    assert drained(spool, 4) == ([each.id for each in rows[4:]], 0)
    assert spool.path.stat().st_size == 0
    assert spool.path.stat().st_mode & 0o077 == 0
    spool.close()
    assert not spool.path.exists()


def test_more_than_is_read_at_once(tmp_path: Path) -> None:
    spool = SpoolRoom(tmp_path, most_bytes=8 << 20).make()
    rows = [row(replica="x" * 256) for _ in range(2000)]
    spool.append(rows)
    assert spool.unread_bytes > 1 << 20
    assert drained(spool, 10_000) == ([each.id for each in rows], 0)
    spool.close()


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    room = SpoolRoom(tmp_path, most_bytes=1 << 20)
    rows = [row(), row()]
    torn = to_lines([row()])[:-20]
    (tmp_path / "left.jsonl").write_bytes(
        to_lines(rows[:1]) + b'{"id": 1}\n\xff\xfe\n\n' + to_lines(rows[1:]) + torn
    )
    spool = room.adopt()
    assert spool is not None
    assert drained(spool) == ([each.id for each in rows], 4)
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_takes_all_of_a_write_or_nothing(tmp_path: Path) -> None:
    rows = [row() for _ in range(3)]
    spool = SpoolRoom(tmp_path, most_bytes=len(to_lines(rows))).make()
    spool.append(rows[:2])
    with pytest.raises(SpoolFull):
        spool.append([row(), row()])
    spool.append(rows[2:])
    assert drained(spool)[0] == [each.id for each in rows]
    spool.close()


def _hold(directory: Path, held: object, release: object) -> None:
    spool = SpoolRoom(directory, most_bytes=1 << 20).make()
    spool.append([row(id="of-the-other")])
    held.set()  # type: ignore[attr-defined] # a multiprocessing event
    release.wait()  # type: ignore[attr-defined]
    os._exit(0)


def test_what_a_living_process_holds_is_not_adopted(tmp_path: Path) -> None:
    room = SpoolRoom(tmp_path, most_bytes=1 << 20)
    ours = room.make()
    spawn = multiprocessing.get_context("spawn")
    held, release = spawn.Event(), spawn.Event()
    other = spawn.Process(target=_hold, args=(tmp_path, held, release))
    other.start()
    try:
        assert held.wait(20)
        assert room.adopt() is None
    finally:
        release.set()
        other.join()
    adopted = room.adopt()
    assert adopted is not None
    assert room.adopt() is None, "it is ours now"
    assert drained(adopted) == (["of-the-other"], 0)
    adopted.close()
    ours.close()
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_file_is_adopted_first(tmp_path: Path) -> None:
    for age, name in ((5, "b"), (10, "c"), (1, "a")):
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(to_lines([row(id=name)]))
        os.utime(path, (1e9 - age, 1e9 - age))
    room, found = SpoolRoom(tmp_path, most_bytes=1 << 20), []
    while (spool := room.adopt()) is not None:
        found += drained(spool)[0]
        spool.close()
    assert found == ["c", "b", "a"]


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"not ours\n")
    (tmp_path / "trap.jsonl").symlink_to(secret)
    assert SpoolRoom(tmp_path, most_bytes=1 << 20).adopt() is None
    assert secret.read_bytes() == b"not ours\n"


def test_every_row_survives_as_text() -> None:
    plain = row(status=None, publish_s=0.5, batch="batch-1")
    assert storable(plain) is plain
    assert from_line(to_lines([plain])) == plain
    odd = replace(
        plain,
        service_class=ServiceClass.BATCH,
        request_id="nul\0 and half \ud83d",
        replica="é" * 300,
        prompt_tokens=1 << 70,
        e2e_s=float("inf"),
    )
    assert storable(odd) == replace(
        plain,
        service_class="batch",
        request_id="nul and half ?",
        replica="é" * 256,
        prompt_tokens=(1 << 63) - 1,
        e2e_s=0.0,
    )
    assert from_line(to_lines([odd])) == storable(odd)


def test_fields_of_other_versions_are_left_out() -> None:
    known = row()
    line = to_lines([known]).replace(b"{", b'{"new_field": [1], ', 1)
    assert from_line(line) == known
