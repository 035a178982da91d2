"""Pages are resident soon, zero until written, and keep what was written meanwhile."""

import sys
from pathlib import Path

import pytest
import torch

from cache.host_memory import PageMemory

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_what_is_written_meanwhile_stays_and_the_rest_is_zero():
    memory = PageMemory(96, MIB)
    memory.pages[40] = 7
    memory.wait_resident()
    assert (memory.pages[40] == 7).all()
    assert int(memory.pages.sum(dtype=torch.int64)) == 7 * MIB
    memory.close()


@pytest.mark.skipif(sys.platform != "linux", reason="residency is read from /proc")
def test_the_pool_is_resident_without_being_touched():
    before = resident_bytes()
    memory = PageMemory(128, MIB)
    memory.wait_resident()
    assert resident_bytes() - before > 120 * MIB
    memory.close()


def test_closing_at_once_is_safe_and_repeatable():
    memory = PageMemory(512, MIB)
    memory.close()
    memory.close()
    assert int(memory.pages[511].sum()) == 0
