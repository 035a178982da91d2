"""What a sum over the ledger can be taken apart by: quick to import, as the command line does."""

from __future__ import annotations

from enum import StrEnum

_HOUR_S, _DAY_S = 3600, 86_400


class GroupBy(StrEnum):
    """Into what a sum is taken apart. Hours and days are those of UTC."""

    MODEL = "model"
    KEY = "key"
    SERVICE_CLASS = "service_class"
    HOUR = "hour"
    DAY = "day"

    @property
    def bucket_s(self) -> int | None:
        """The length of one bucket of time."""
        return {GroupBy.HOUR: _HOUR_S, GroupBy.DAY: _DAY_S}.get(self)
