"""What became of one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a client would have got: the status, the JSON body, and the request's id.
    `retry_after_s` is what a refusal says about when to come again."""

    status_code: int
    body: dict[str, object]
    request_id: str
    retry_after_s: float | None = None
