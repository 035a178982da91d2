"""The Dockerfile as a list of instructions."""

from __future__ import annotations

import re

from tests.deploy.stack import ROOT


def instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of every instruction, continued lines joined."""
    lines = re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text())
    joined = re.sub(r"\\\n\s*", " ", lines)
    return [
        (line.split(maxsplit=1)[0], line.split(maxsplit=1)[1])
        for line in joined.splitlines()
        if line.strip()
    ]


def of(keyword: str) -> list[str]:
    """What follows each instruction of this keyword."""
    return [rest for name, rest in instructions() if name == keyword]
