"""Forms, queries and answers of /v1/files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.batches.ids import Kind, is_id
from gateway.batches.stored_file import INPUT, FilePage, StoredFile
from gateway.errors import ApiError, bad_request

LEAST_TTL_S = 3600
MOST_TTL_S = 30 * 86_400
_MOST_LISTED = 10_000
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


@dataclass(frozen=True, slots=True)
class Listing:
    """Which files to list."""

    purpose: str | None
    after: str | None
    limit: int
    ascending: bool


def read_upload_fields(fields: Mapping[str, str]) -> float | None:
    """For how many seconds a file is to be kept, None if its form does not say; raises the 400 that
    names the field which is wrong."""
    if "purpose" not in fields:
        raise bad_request("purpose is required.", param="purpose")
    if fields["purpose"] != INPUT:
        raise bad_request(f"purpose must be {INPUT}: nothing else reads files.", param="purpose")
    if _ANCHOR not in fields and _SECONDS not in fields:
        return None
    if fields.get(_ANCHOR) != "created_at":
        raise bad_request("expires_after.anchor must be created_at.", param="expires_after.anchor")
    seconds = _whole(fields.get(_SECONDS, ""))
    if seconds is None or not LEAST_TTL_S <= seconds <= MOST_TTL_S:
        raise bad_request(
            f"expires_after.seconds must be between {LEAST_TTL_S} and {MOST_TTL_S}.",
            param="expires_after.seconds",
        )
    return float(seconds)


def read_listing(query: Mapping[str, str]) -> Listing:
    """From a list's query; raises the 400 that names the parameter which is wrong."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", param="order")
    purpose = query.get("purpose")
    if purpose is not None and not purpose.isprintable():
        raise bad_request("purpose must be printable text.", param="purpose")
    return Listing(
        purpose=purpose,
        after=read_after(query, "file-"),
        limit=read_limit(query, _MOST_LISTED, _MOST_LISTED),
        ascending=order == "asc",
    )


def read_after(query: Mapping[str, str], kind: Kind) -> str | None:
    """The name behind which a page begins."""
    after = query.get("after") or None
    if after is not None and not is_id(kind, after):
        raise bad_request("after must be the id of one that was listed.", param="after")
    return after


def read_limit(query: Mapping[str, str], usual: int, most: int) -> int:
    """How many to list."""
    if "limit" not in query:
        return usual
    limit = _whole(query["limit"])
    if limit is None or not 1 <= limit <= most:
        raise bad_request(f"limit must be between 1 and {most}.", param="limit")
    return limit


def file_card(file: StoredFile) -> dict[str, object]:
    """One file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": int(file.created_s),
        "expires_at": None if file.expires_s is None else int(file.expires_s),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def file_list(page: FilePage) -> dict[str, object]:
    """Some files."""
    return page_card([file_card(file) for file in page.files], has_more=page.has_more)


def page_card(cards: list[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    """A page of a list, as OpenAI's clients turn it."""
    return {
        "object": "list",
        "data": cards,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
        "has_more": has_more,
    }


def file_deletion(file_id: str) -> dict[str, object]:
    """What a deleted one leaves."""
    return {"id": file_id, "object": "file", "deleted": True}


def file_not_found() -> ApiError:
    """404: none of this id, one that has expired, or somebody else's; all look the same."""
    return ApiError(
        404,
        "There is no file of this id, or it has expired; GET /v1/files lists them.",
        param="file_id",
        code="file_not_found",
    )


def file_in_use() -> ApiError:
    """409: a batch reads it."""
    return ApiError(409, "A batch that has not ended was made from this file.", code="file_in_use")


def storage_full(most_bytes: int) -> ApiError:
    """400: the tenant must delete something first."""
    return bad_request(
        f"This tenant's files and open batches may hold {most_bytes} bytes, and with this there "
        "would be more. Delete files that are not needed any more.",
        code="storage_limit_exceeded",
    )


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
