"""The operator asks about a request by its id."""

from __future__ import annotations

from gateway.errors import ApiError
from gateway.recent_requests import REMEMBERED, RecentRequest, RecentRequests


def remembered(recent: RecentRequests, request_id: str) -> tuple[RecentRequest, ...]:
    """The requests of this id, the latest first. Raises a 404 ApiError if there are none."""
    found = recent.find(request_id)
    if not found:
        raise ApiError(
            404,
            f"No request of this id is among the last {REMEMBERED} that reached a replica of "
            "this gateway and have ended; the id is the answer's x-request-id.",
            code="request_not_found",
        )
    return found
