"""Bytes arrive whole, uploads go first, and every transfer is reported exactly once."""

import random
import threading
import time
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.copier import CudaCopier, ThreadCopier, make_copier
from cache.host_arena import HostArena

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


class Report:
    """Collects what one transfer says of itself."""

    def __init__(self) -> None:
        self.said: list[float | None] = []
        self.on_caller = False
        self._caller = threading.get_ident()
        self._heard = threading.Event()

    def __call__(self, seconds: float | None) -> None:
        self.said.append(seconds)
        self.on_caller |= threading.get_ident() == self._caller
        self._heard.set()

    def wait(self) -> float | None:
        assert self._heard.wait(10), "the copier did not answer"
        return self.said[0]


def noise(rows: int, row_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def make(device: str, blocks: int, slots: int, block_bytes: int) -> tuple[torch.Tensor, HostArena]:
    pages = noise(blocks, block_bytes, seed=1).to(device)
    arena = HostArena(slots, block_bytes, header_bytes=112, pinned=device == "cuda")
    arena.payloads.copy_(noise(slots, block_bytes, seed=2))
    return pages, arena


MOVES = {
    "one": [(3, 5)],
    "a run": [(2 + i, 7 + i) for i in range(9)],
    "backwards": [(11 - i, 2 + i) for i in range(9)],
    "scattered": list(zip(random.Random(3).sample(range(16), 12), range(12), strict=True)),
    "runs and gaps": [(0, 4), (1, 5), (2, 6), (9, 7), (10, 8), (4, 0), (5, 2)],
    "none": [],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES.keys())
@pytest.mark.parametrize("block_bytes", [1000, 9001])
def test_what_is_moved_is_the_same_and_nothing_else_changes(
    device, moves, block_bytes, monkeypatch
):
    monkeypatch.setattr("cache.copier._PIECE_BYTES", 2500)  # two blocks, or a part of one
    monkeypatch.setattr("cache.copier._CUDA_PIECE_BYTES", 2500)
    pages, arena = make(device, 16, 16, block_bytes)
    expected = arena.payloads.clone()
    for page, slot in moves:
        expected[slot] = pages[page].cpu()
    with closing(arena), closing(make_copier(pages, arena)) as copier:
        down, up = Report(), Report()
        copier.download(moves, down)
        seconds = down.wait()
        assert seconds is not None
        assert seconds >= 0
        assert torch.equal(arena.payloads, expected)

        pages.zero_()
        copier.upload([(slot, page) for page, slot in moves], up)
        assert up.wait() is not None
        back = torch.zeros_like(expected)
        for page, slot in moves:
            back[page] = expected[slot]
        assert torch.equal(pages.cpu(), back)
        assert not down.on_caller
        assert not up.on_caller


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_set_of_moves_there_and_back(data):
    blocks, slots = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    count = data.draw(st.integers(0, min(blocks, slots)))
    sources = data.draw(st.permutations(range(blocks)))[:count]
    targets = data.draw(st.permutations(range(slots)))[:count]
    moves = list(zip(sources, targets, strict=True))
    pages, arena = make("cpu", blocks, slots, data.draw(st.integers(1, 300)))
    original = pages.clone()
    with closing(arena), closing(ThreadCopier(pages, arena)) as copier:
        down, up = Report(), Report()
        copier.download(moves, down)
        down.wait()
        for page, _ in moves:
            pages[page] = 0
        copier.upload([(slot, page) for page, slot in moves], up)
        up.wait()
        assert torch.equal(pages, original)


class Gate:
    """Holds the copier's thread inside a `done`, so that what follows is queued behind it."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, seconds: float | None) -> None:
        self.entered.set()
        assert self.open.wait(10)


def test_an_upload_overtakes_downloads_that_wait():
    pages, arena = make("cpu", 8, 8, 4096)
    with closing(arena), closing(ThreadCopier(pages, arena)) as copier:
        gate, order = Gate(), []
        copier.download([(0, 0)], gate)
        assert gate.entered.wait(10)
        for name in ("down 1", "down 2"):
            copier.download([(1, 1)], lambda _, name=name: order.append(name))
        for name in ("up 1", "up 2"):
            copier.upload([(2, 2)], lambda _, name=name: order.append(name))
        gate.open.set()
        copier.close()
        assert order == ["up 1", "up 2", "down 1", "down 2"]


def test_an_upload_overtakes_a_long_download_under_way(monkeypatch):
    monkeypatch.setattr("cache.copier._PIECE_BYTES", 4096)
    pages, arena = make("cpu", 8, 8, 4096)
    copied, order = [], []
    under_way, asked = threading.Event(), threading.Event()
    plain_pieces = ThreadCopier._pieces

    def pieces(copier, job):
        for seconds in plain_pieces(copier, job):
            copied.append("up" if job.upward else "down")
            if len(copied) == 3:
                under_way.set()
                assert asked.wait(10)
            yield seconds

    monkeypatch.setattr(ThreadCopier, "_pieces", pieces)
    with closing(arena), closing(ThreadCopier(pages, arena)) as copier:
        copier.download([(7 - slot, slot) for slot in range(8)], lambda _: order.append("down"))
        assert under_way.wait(10)
        copier.upload([(0, 7), (2, 6)], lambda _: order.append("up"))
        asked.set()
    assert order == ["up", "down"]
    assert copied == ["down"] * 3 + ["up"] * 2 + ["down"] * 5


@pytest.mark.parametrize("device", DEVICES)
def test_closing_finishes_what_was_asked_for(device):
    pages, arena = make(device, 40, 40, 1 << 20)
    reports = [Report() for _ in range(40)]
    with closing(arena):
        copier = make_copier(pages, arena)
        for block, report in enumerate(reports):
            copier.download([(block, 39 - block)], report)
        copier.close()
        copier.close()
        assert [len(report.said) for report in reports] == [1] * 40
        assert torch.equal(arena.payloads.flip(0), pages.cpu())
        with pytest.raises(RuntimeError, match="closed"):
            copier.download([(0, 0)], Report())
        with pytest.raises(RuntimeError, match="closed"):
            copier.upload([(0, 0)], Report())


@pytest.mark.parametrize("device", DEVICES)
def test_a_failed_copy_is_reported_once_and_the_next_succeeds(device, caplog):
    pages, arena = make(device, 4, 4, 1024)
    with closing(arena), closing(make_copier(pages, arena)) as copier:
        bad, good = Report(), Report()
        copier.download([(0, 0), (99, 1)], bad)
        copier.download([(2, 3)], good)
        assert bad.wait() is None
        assert good.wait() is not None
        assert torch.equal(arena.payloads[3], pages[2].cpu())
    assert len(bad.said) == len(good.said) == 1
    assert "copying 2 blocks failed" in caplog.text


def test_a_receiver_that_fails_does_not_end_the_copies_of_others(caplog):
    pages, arena = make("cpu", 4, 4, 1024)
    calls = []

    def broken(seconds: float | None) -> None:
        calls.append(seconds)
        raise ValueError("no ears")

    with closing(arena), closing(ThreadCopier(pages, arena)) as copier:
        copier.download([(0, 0)], broken)
        report = Report()
        copier.download([(1, 1)], report)
        assert report.wait() is not None
    assert len(calls) == 1
    assert "no ears" in caplog.text


def test_many_callers_each_hear_exactly_once():
    pages, arena = make("cpu", 64, 64, 512)
    reports = [Report() for _ in range(400)]
    with closing(arena), closing(ThreadCopier(pages, arena)) as copier:

        def ask(first: int) -> None:
            for index in range(first, 400, 4):
                block = index % 64
                move = copier.upload if index % 3 else copier.download
                move([(block, block)], reports[index])

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(len(report.said) == 1 and report.said[0] is not None for report in reports)


def test_pages_and_arena_must_agree():
    arena = HostArena(2, 1024, header_bytes=0, pinned=False)
    with closing(arena):
        with pytest.raises(ValueError, match="1024 bytes"):
            make_copier(torch.zeros(4, 1025, dtype=torch.uint8), arena)
        with pytest.raises(ValueError, match="float32"):
            make_copier(torch.zeros(4, 1024), arena)
        with pytest.raises(ValueError, match="meta"):
            make_copier(torch.zeros(4, 1024, dtype=torch.uint8, device="meta"), arena)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    def test_an_unpinned_arena_works_too(self):
        pages = noise(24, 1 << 20, seed=1).cuda()
        arena = HostArena(24, 1 << 20, header_bytes=112, pinned=False)
        with closing(arena), closing(make_copier(pages, arena)) as copier:
            for turn in range(5):
                pages.random_(0, 256)
                expected = pages.clone()
                down, up = Report(), Report()
                copier.download([(block, 23 - block) for block in range(24)], down)
                assert down.wait() is not None
                assert torch.equal(arena.payloads.flip(0), expected.cpu())
                pages.fill_(turn)
                copier.upload([(23 - block, block) for block in range(24)], up)
                assert up.wait() is not None
                assert torch.equal(pages, expected)

    @pytest.mark.parametrize("other_stream", [False, True])
    def test_a_download_waits_for_what_was_launched_before_it(self, other_stream):
        pages, arena = make("cuda", 32, 32, 1 << 20)
        stream = torch.cuda.Stream() if other_stream else torch.cuda.current_stream()
        torch.cuda.synchronize()
        with closing(arena), closing(CudaCopier(pages, arena)) as copier:
            report = Report()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)  # about a tenth of a second
                pages.fill_(77)
                began = time.perf_counter()
                copier.download([(block, block) for block in range(32)], report)
                assert time.perf_counter() - began < 0.02, "the call waited for the device"
            assert report.wait() is not None
            assert (arena.payloads == 77).all()

    def test_what_is_launched_after_an_upload_sees_it(self):
        pages, arena = make("cuda", 64, 64, 1 << 20)
        with closing(arena), closing(CudaCopier(pages, arena)) as copier:
            for turn in range(20):
                arena.payloads.fill_(turn)
                report = Report()
                copier.upload([(block, 63 - block) for block in range(64)], report)
                report.wait()
                assert int(pages.to(torch.int64).sum()) == turn * pages.numel()

    def test_an_upload_waits_for_a_step_that_still_reads_the_page(self):
        pages, arena = make("cuda", 8, 8, 1 << 20)
        before = pages.clone()
        arena.payloads.zero_()
        torch.cuda.synchronize()
        with closing(arena), closing(CudaCopier(pages, arena)) as copier:
            report = Report()
            torch.cuda._sleep(200_000_000)
            read = pages.clone()
            copier.upload([(block, block) for block in range(8)], report)
            report.wait()
            torch.cuda.synchronize()
            assert torch.equal(read, before)
            assert int(pages.sum()) == 0
