"""Memory and CPU time of a process and its descendants, from a made-up and from the real /proc."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from loadtest.machine import describe_machine
from loadtest.process_tree import cpu_seconds, descendants_rss_bytes, peak_rss_bytes, rss_bytes


def process(proc: Path, pid: int, parent: int, peak_kib: int | None, name: str = "x") -> None:
    directory = proc / str(pid)
    directory.mkdir()
    (directory / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0")
    lines = ["Name: x"]
    if peak_kib is not None:
        lines += [f"VmHWM:\t  {peak_kib} kB", f"VmRSS:\t  {peak_kib // 2} kB"]
    (directory / "status").write_text("\n".join(lines))


def test_a_tree_adds_up_and_others_do_not_count(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 100)
    process(tmp_path, 11, 10, 20, name="odd) S 1 (name")
    process(tmp_path, 12, 11, 3)
    process(tmp_path, 13, 10, None)
    process(tmp_path, 20, 1, 5000)
    (tmp_path / "meminfo").write_text("")

    assert peak_rss_bytes(10, tmp_path) == 123 * 1024
    assert rss_bytes(10, tmp_path) == 50 * 1024
    assert descendants_rss_bytes(10, tmp_path) == 11 * 1024
    assert descendants_rss_bytes(12, tmp_path) is None


def test_cpu_time_is_that_of_the_tree(tmp_path: Path) -> None:
    for pid, parent, own, kernel in ((10, 1, 300, 50), (11, 10, 40, 10), (20, 1, 7000, 0)):
        (tmp_path / str(pid)).mkdir()
        fields = f"{pid} (x) S {parent} " + "0 " * 9 + f"{own} {kernel} 0 0"
        (tmp_path / str(pid) / "stat").write_text(fields)

    assert cpu_seconds(10, tmp_path) == pytest.approx(400 / os.sysconf("SC_CLK_TCK"))
    assert cpu_seconds(99, tmp_path) is None


def test_a_process_that_is_gone_has_no_peak(tmp_path: Path) -> None:
    assert peak_rss_bytes(99, tmp_path) is None
    assert rss_bytes(99, tmp_path) is None


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_this_process_has_a_peak() -> None:
    peak = peak_rss_bytes(os.getpid())

    assert peak is not None
    assert peak > 10 << 20


def test_the_machine_is_described_with_its_telling_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n")
    cpu, memory, system = describe_machine(cpuinfo)

    assert cpu.startswith("CPU: Some CPU, ")
    assert cpu.endswith("(avx2 amx_bf16)")
    assert memory.endswith(" GiB")
    assert "Python 3." in system
    assert describe_machine(tmp_path / "missing")[0].startswith("CPU: ")
