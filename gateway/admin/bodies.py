"""What the operator may send about tenants and keys, checked as the configuration is."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from gateway.errors import ApiError, bad_request
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.settings_errors import describe, dotted, shown_key
from gateway.settings_section import Section
from gateway.settings_tenants import TENANT_ID, TENANT_ID_RULE, LimitSettings
from gateway.settings_units import LongDurationS
from gateway.wire.json_body import parse_object

SectionT = TypeVar("SectionT", bound=Section)

_LATEST_S = 253_402_300_799.0  # the end of the year 9999


def unix_time(value: Any) -> float:
    """Unix seconds, as a number or RFC 3339 text with its offset; raises ValueError."""
    moment: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        moment = float(value)
    elif isinstance(value, str):
        try:
            moment = float(value)
        except ValueError:
            try:
                parsed = datetime.fromisoformat(value)
                moment = None if parsed.tzinfo is None else parsed.timestamp()
            except (ValueError, OverflowError):
                moment = None
    if moment is None or not 0 <= moment <= _LATEST_S:
        raise ValueError("must be Unix seconds, or a time such as 2026-01-31T12:00:00Z")
    return moment


UnixTime = Annotated[float, BeforeValidator(unix_time)]
Name = Annotated[str, Field(max_length=128)]


class _Expiry(Section):
    """When a key ends: a time, or so many seconds from now; at most one of the two."""

    expires_at: UnixTime | None = None
    expires_in: Annotated[LongDurationS, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _has_one_end(self) -> _Expiry:
        if self.expires_at is not None and self.expires_in is not None:
            raise ValueError("expires_at and expires_in exclude each other")
        return self

    def expires_s(self, now_s: float) -> float | None:
        """Unix seconds; None: never. Raises a 400 ApiError for what is past."""
        if self.expires_in is not None:
            return now_s + self.expires_in
        if self.expires_at is not None and self.expires_at <= now_s:
            raise bad_request("expires_at must be in the future.", param="expires_at")
        return self.expires_at


class _Named(Section):
    name: Name = ""

    @field_validator("name")
    @classmethod
    def _can_be_shown(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must be printable text")
        return value


class NewKeyBody(_Expiry, _Named):
    """A key to be made."""

    tenant: str
    limits: LimitSettings = LimitSettings()

    @field_validator("tenant")
    @classmethod
    def _is_an_id(cls, value: str) -> str:
        if not TENANT_ID.fullmatch(value):
            raise ValueError(TENANT_ID_RULE)
        return value


class KeyChangeBody(_Expiry, _Named):
    """What is to change of a key; what is left out stays, `expires_at: null` is never."""

    limits: LimitSettings = LimitSettings()


class RotateBody(Section):
    """How long the old key stays valid, and how long the new one will be (None: as the old one
    was made for)."""

    grace_s: LongDurationS = 86_400.0
    expires_in: Annotated[LongDurationS, Field(gt=0)] | None = None


def queried_tenant(query: Mapping[str, str]) -> str | None:
    """The `tenant` that is asked about, None for all; it may be one that is gone. Raises a 400
    ApiError for what no tenant was ever called."""
    tenant = query.get("tenant")
    if tenant is not None and not TENANT_ID.fullmatch(tenant):
        raise bad_request(f"tenant {TENANT_ID_RULE}.", param="tenant")
    return tenant


async def body_object(call: HttpCall, limit_bytes: int) -> dict[str, object]:
    """The call's JSON object; no body at all is an empty one. Raises ApiError."""
    body = await read_body(call, limit_bytes)
    return parse_object(body) if body else {}


def validated(section: type[SectionT], values: object) -> SectionT:
    """A section as the configuration has it. Raises a 400 that names the first field at fault, and
    nothing of its value."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    first: Mapping[str, Any] = dict(error.errors(include_url=False, include_input=False)[0])
    place = first["loc"]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        place = (*place[:-1], shown_key(place[-1]))
    path = dotted(place)
    reason = describe(first, ())
    return bad_request(f"{path}: {reason}." if path else f"{reason}.", param=path or None)


def merged(given: object, patch: object) -> object:
    """A JSON merge patch (RFC 7396): null takes a member away, objects merge, all else replaces."""
    if not isinstance(patch, dict):
        return patch
    result = dict(given) if isinstance(given, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result
