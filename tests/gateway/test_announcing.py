"""A server goes on when nobody can be told that it does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ANNOUNCE = """
import sys
from gateway.announcing import announce
print(announce("serves\\n"), announce("again\\n"), file=sys.stderr)
"""


def announced(stdout: int) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", _ANNOUNCE]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=20, check=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        ended = announced(full.fileno())
    assert (ended.returncode, ended.stderr) == (0, b"False True\n")


def test_a_reader_that_has_left() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ended = announced(writing)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"False True\n")
