"""Every action of the operator's leaves a row in the audit trail, and `/admin/audit` shows them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from gateway.admin.auth import operator_id, require_operator
from gateway.admin.bodies import unix_time
from gateway.errors import ApiError, bad_request, unavailable
from gateway.http_call import HttpCall
from gateway.registry.audit import AuditFilter, AuditTrail, Deed, Outcome
from gateway.reload import RuntimeConfig
from gateway.wire.unknown_names import refuse_unknown_parameters

Handler = Callable[[HttpCall], Awaitable[None]]

_PAGE = 100
_LARGEST_PAGE = 1_000
_LARGEST_ID = (1 << 31) - 1
_RETRY_AFTER_S = 5
_TOLD = ("model", "unknown", "drain_s")
_PARAMETERS = ("action", "target", "actor", "since", "until", "before", "limit")
"""Of an action's query, what is written down. A user who was erased is to be named nowhere."""


@dataclass(frozen=True, slots=True)
class Action:
    """What changes something: its name and on what it is done, as the audit trail has them; `do`
    is given the deed, to say more of it."""

    name: str
    target: str
    do: Callable[[HttpCall, Deed], Awaitable[None]]


class Audited:
    """Carries out actions, and has each written down: whoever asked with the operator's key, and
    however it ended."""

    def __init__(self, runtime: RuntimeConfig, trail: AuditTrail, secret: bytes) -> None:
        """`secret` is the server's."""
        self._runtime = runtime
        self._trail = trail
        self._secret = secret

    async def carry_out(self, call: HttpCall, action: Action) -> None:
        """The handler of an action. Who has no operator's key does nothing, and leaves no row: the
        trail is not for others to fill."""
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        query = call.query()
        deed = Deed(
            actor=operator_id(self._secret, snapshot),
            action=action.name,
            target=action.target,
            client=call.client_address(snapshot.settings.server.trusted_proxies) or "",
            request_id=call.request_id,
            detail={name: query[name] for name in _TOLD if name in query},
        )
        if "user" in query:
            deed.detail["one_user"] = True
        outcome: Outcome = "failed"
        try:
            await action.do(call, deed)
            outcome = "success" if (call.status or 200) < 400 else "failed"
        except ApiError as error:
            outcome = "refused" if error.status < 500 else "failed"
            deed.detail["error"] = error.code or str(error.status)
            raise
        finally:
            await self._trail.note(deed, outcome)


class AuditAdmin:
    """Handlers. Each needs the operator's key."""

    def __init__(self, runtime: RuntimeConfig, trail: AuditTrail) -> None:
        self._runtime = runtime
        self._trail = trail

    async def show(self, call: HttpCall) -> None:
        """Rows, the newest first, at most `limit` of them: those of an `action` ("key" is all that
        is done to keys), a `target`, an `actor`, from `since` on, before `until`, and before the
        row `before`, which is how to go on: the answer's `next`, null at the end."""
        require_operator(call, self._runtime.current)
        query = call.query()
        refuse_unknown_parameters(query, _PARAMETERS)
        wanted = AuditFilter(
            action=_text(query, "action"),
            target=_text(query, "target"),
            actor=_text(query, "actor"),
            since_s=_time(query, "since"),
            until_s=_time(query, "until"),
            before=_whole(query, "before", _LARGEST_ID),
        )
        limit = _whole(query, "limit", _LARGEST_PAGE) or _PAGE
        try:
            rows = await self._trail.page(wanted, limit + 1)
        except SQLAlchemyError:
            raise unavailable(
                "The database cannot be used right now.",
                code="database_unavailable",
                retry_after_s=_RETRY_AFTER_S,
            ) from None
        more = len(rows) > limit
        rows = rows[:limit]
        await call.answer_json({"entries": rows, "next": rows[-1]["id"] if more else None})


def _text(query: dict[str, str], name: str) -> str | None:
    text = query.get(name)
    if text is not None and not text.isprintable():
        raise bad_request(f"{name} must be printable text.", param=name)
    return text


def _time(query: dict[str, str], name: str) -> float | None:
    if name not in query:
        return None
    try:
        return unix_time(query[name])
    except ValueError as error:
        raise bad_request(f"{name} {error}.", param=name) from None


def _whole(query: dict[str, str], name: str, most: int) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most):
        raise bad_request(f"{name} must be a whole number from 1 to {most}.", param=name)
    return int(text)
