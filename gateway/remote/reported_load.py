"""How busy a server says that it is, on its page of metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from gateway.settings_fleet import RemoteEngine
from policies.routing import Standing

MAX_PAGE_BYTES = 4 << 20

_NAMES: Mapping[RemoteEngine, tuple[bytes, bytes]] = {
    "vllm": (rb"vllm:num_requests_running", rb"vllm:num_requests_waiting"),
    "sglang": (rb"sglang:num_running_reqs", rb"sglang:num_queue_reqs"),
    "llama.cpp": (rb"llamacpp:requests_processing", rb"llamacpp:requests_deferred"),
}
TELLS_LOAD = frozenset(_NAMES)
_STARTED = rb"process_start_time_seconds"
_MOST = 1e6


class ReportedLoad(NamedTuple):
    """Sequences that a server runs and that wait there, whoever sent them. `started_s` is when its
    process began, in Unix seconds, if it says so: another one is another process."""

    running: int
    waiting: int
    started_s: float | None = None


def parse_load(page: bytes, engine: RemoteEngine) -> ReportedLoad | None:
    """From a page in Prometheus' text format; None if it does not say. What a server counts apart
    (by model, by rank) is added up."""
    names = _NAMES.get(engine)
    if names is None:
        return None
    running, waiting = (_sum(page, name) for name in names)
    if running is None or waiting is None:
        return None
    started = [value for value in _values(page, _STARTED) if value > 0]
    return ReportedLoad(int(running), int(waiting), max(started, default=None))


def foreign_load(
    reported: ReportedLoad, own_waiting: int, own_running: int, prompt_tokens: int
) -> Standing:
    """What others than this gateway have put on a server, never less than nothing; a prompt of
    theirs is taken to be as long as ours are, which is `prompt_tokens`."""
    total = max(0, reported.running + reported.waiting - own_running - own_waiting)
    waiting = min(total, max(0, reported.waiting - own_waiting))
    running = total - waiting
    return Standing(
        pending_tokens=waiting * prompt_tokens,
        waiting=waiting,
        running=running,
        context_tokens=running * prompt_tokens,
    )


def _sum(page: bytes, name: bytes) -> float | None:
    values = _values(page, name)
    return min(sum(values), _MOST) if values else None


def _values(page: bytes, name: bytes) -> list[float]:
    """A metric's samples, as far as they are finite and not negative."""
    found = []
    for match in re.finditer(rb"^%b(?:\{[^\n]*\})?[ \t]+([^\s]{1,32})" % name, page, re.MULTILINE):
        try:
            value = float(match[1])
        except ValueError:
            continue
        if 0 <= value < math.inf:
            found.append(value)
    return found
