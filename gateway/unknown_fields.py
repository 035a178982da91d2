"""Fields that no API has: accepted, counted, and said once in the log."""

from __future__ import annotations

import re
from collections.abc import Iterable

import structlog

from gateway.metrics import Metrics

_log = structlog.get_logger("forebay.api")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_LOGGED_NAMES = 200


class UnknownFields:
    """Remembers which names it has logged; a bounded number of them, whatever clients send."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._logged: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        """Count each, and log those that are new and look like a field's name."""
        for name in names:
            self._metrics.unknown_field()
            if name in self._logged or len(self._logged) >= _LOGGED_NAMES:
                continue
            if _NAME.fullmatch(name):
                self._logged.add(name)
                _log.warning("unknown request field ignored", field=name)
