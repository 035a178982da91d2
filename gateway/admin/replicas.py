"""`/admin/replicas`: see, add, drain and remove replicas while requests run."""

from __future__ import annotations

from typing import Any

import structlog
from pydantic import ValidationError

from gateway.admin.auth import require_operator
from gateway.admin.route_answers import member_answer
from gateway.credentials import is_gateways_own
from gateway.dispatch.member import Member, Routable
from gateway.dispatch.router import Router
from gateway.errors import ApiError, bad_request
from gateway.fleet_control import FleetControl
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.models import Models
from gateway.registry.audit import Deed
from gateway.reload import RuntimeConfig, Snapshot
from gateway.settings_fleet import RemoteSettings
from gateway.utilization_metrics import UtilizationCollector
from gateway.wire.fields import Fields
from gateway.wire.json_body import parse_object
from gateway.wire.unknown_names import refuse_unknown_fields, refuse_unknown_parameters

_log = structlog.get_logger("forebay.admin")

_LONGEST_DRAIN_S = 3600.0


class ReplicaAdmin:
    """Handlers. Each needs the operator's key. What is added here lasts until a restart: what is to
    last belongs into the configuration."""

    def __init__(
        self,
        runtime: RuntimeConfig,
        models: Models,
        control: FleetControl,
        utilization: UtilizationCollector,
    ) -> None:
        self._runtime = runtime
        self._models = models
        self._control = control
        self._utilization = utilization

    async def show_all(self, call: HttpCall) -> None:
        """Every model's replicas."""
        self._admitted(call)
        await call.answer_json(
            {
                "replicas": [
                    self._answer(name, member)
                    for name, model in self._models.items()
                    for member in model.router.members
                ]
            }
        )

    async def show_one(self, call: HttpCall, name: str) -> None:
        """One replica; a 404 if there is none of this name."""
        self._admitted(call)
        router, member = self._find(name)
        await call.answer_json(self._answer(router.model, member))

    async def add(self, call: HttpCall, deed: Deed) -> None:
        """`{"model": NAME}` starts one more engine of ours, `{"model": NAME, "remote": {...}}` uses
        one more server, described as in the configuration. 201."""
        snapshot = self._admitted(call)
        fields = Fields(parse_object(await read_body(call, snapshot.settings.server.body_limit)))
        model = fields.required_string("model")
        remote = fields.value("remote")
        refuse_unknown_fields(fields.unread(), ("model", "remote"))
        if model not in self._models:
            raise ApiError(404, "There is no such model.", param="model", code="model_not_found")
        try:
            if remote is None:
                name = await self._control.add_local(model)
            else:
                server = _remote_settings(remote)
                _refuse_own_secret(server, snapshot)
                name = await self._control.add_remote(model, server)
        except ValueError as refusal:
            raise ApiError(409, f"{_sentence(refusal)}", code="replica_not_added") from None
        deed.target = name
        deed.detail |= {"model": model, "remote": remote is not None}
        _log.info("replica added", replica=name, model=model)
        _, member = self._find(name)
        await call.answer_json(self._answer(model, member), status=201)

    async def drain(self, call: HttpCall, name: str) -> None:
        """Send nothing there any more; what runs there goes on. `resume` takes it back."""
        self._admitted(call)
        router, member = self._find(name)
        member.draining = True
        router.changed()
        _log.info("replica drains", replica=name, model=router.model)
        await call.answer_json(self._answer(router.model, member))

    async def resume(self, call: HttpCall, name: str) -> None:
        """Send requests there again."""
        self._admitted(call)
        router, member = self._find(name)
        member.draining = False
        router.changed()
        _log.info("replica resumes", replica=name, model=router.model)
        await call.answer_json(self._answer(router.model, member))

    async def remove(self, call: HttpCall, name: str) -> None:
        """Drain a replica and take it away; what still runs there after `drain_s` seconds (as the
        server's own, if not given) goes on at another replica."""
        snapshot = self._admitted(call)
        self._find(name)
        drain_s = _drain_s(call, snapshot.settings.server.drain_s)
        try:
            await self._control.retire(name, drain_s)
        except ValueError as refusal:
            raise ApiError(409, _sentence(refusal), code="replica_not_removed") from None
        await call.answer_json({"replica": name, "removed": True})

    def _answer(self, model: str, member: Member[Routable]) -> dict[str, Any]:
        return member_answer(model, member, self._utilization.of(member.name))

    def _find(self, name: str) -> tuple[Router[Routable], Member[Routable]]:
        for model in self._models.values():
            if (member := model.router.find(name)) is not None:
                return model.router, member
        raise ApiError(404, "There is no replica of this name.", code="replica_not_found")

    def _admitted(self, call: HttpCall) -> Snapshot:
        snapshot = self._runtime.current
        require_operator(call, snapshot)
        return snapshot


def _remote_settings(value: object) -> RemoteSettings:
    try:
        return RemoteSettings.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(("remote", *(str(part) for part in first["loc"])))
        reason = first["msg"].removeprefix("Value error, ")
        raise bad_request(f"{path}: {reason}", param=path) from None


def _refuse_own_secret(server: RemoteSettings, snapshot: Snapshot) -> None:
    """Raises ValueError where the server would be sent a secret of this gateway's: the fleet goes
    by the configuration that it was opened with, and a reload may have named further ones."""
    variable = server.api_key_env
    if variable is not None and is_gateways_own(variable, snapshot.settings):
        raise ValueError(f"the variable {variable} is for a secret of this gateway's own")


def _drain_s(call: HttpCall, default: float) -> float:
    query = call.query()
    refuse_unknown_parameters(query, ("drain_s",))
    given = query.get("drain_s")
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _LONGEST_DRAIN_S:
        raise bad_request(
            f"drain_s must be seconds from 0 to {_LONGEST_DRAIN_S:.0f}.", param="drain_s"
        )
    return seconds


def _sentence(refusal: Exception) -> str:
    text = str(refusal)
    return text[:1].upper() + text[1:] + "."
