"""One server elsewhere that runs a model: its connections, its condition, its cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from time import monotonic
from types import TracebackType
from urllib.parse import urlsplit

import structlog

from gateway.dispatch.member import Condition, Health
from gateway.dispatch.receipt import Receipt
from gateway.ended_tasks import end_task
from gateway.remote.exchange import Connections, Exchange, Patience
from gateway.remote.failures import Cleaner, LossKind, UpstreamLost
from gateway.remote.getting import Getter
from gateway.remote.own_load import OwnLoad
from gateway.remote.probes import Prober, ProbeTarget, ProbeTimes
from gateway.remote.reported_load import ReportedLoad, foreign_load
from gateway.settings_fleet import RemoteEngine, RemoteSettings
from policies.cost import Coefficients
from policies.remote_cost import RemoteCost
from policies.routing import Standing

_log = structlog.get_logger("forebay.remote")

_LONGEST_HOLD_S = 10.0
_ABOUT_US = frozenset({401, 402, 407})


@dataclass(frozen=True, slots=True)
class RemoteTimes:
    """Seconds until a server is given up: without a first byte, beyond what was predicted
    (`first_s`); without another byte (`between_s`); without the whole of an answer that is not
    streamed (`whole_s`)."""

    first_s: float = 60.0
    between_s: float = 30.0
    whole_s: float = 600.0
    probes: ProbeTimes = field(default_factory=ProbeTimes)


class RemoteReplica:
    """Implements `Routable`. An async scope: it is probed, and may be used, inside it."""

    def __init__(
        self,
        model: str,
        settings: RemoteSettings,
        *,
        api_key: str | None,
        on_change: Callable[[], None],
        on_load: Callable[[Standing], None],
        on_restart: Callable[[], None],
        times: RemoteTimes,
        random: Random,
    ) -> None:
        parts = urlsplit(settings.url)
        self.name = f"{model}/{settings.host}"
        self.model = model
        self.engine: RemoteEngine = settings.engine
        self.served_model = settings.model or model
        self.shares_cache = settings.shared_cache == "accept"
        self.max_running = settings.max_running
        self.times = times
        self.own_load = OwnLoad()
        self.cleaner = Cleaner(
            secrets=[api_key] if api_key else [],
            hosts=[parts.netloc, parts.hostname or ""],
            served_model=self.served_model,
            model=model,
        )
        self._url = settings.url
        self._authorization = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._on_change = on_change
        self._on_load = on_load
        self._on_restart = on_restart
        self._random = random
        self._health = Health(Condition.STARTING, "not probed yet")
        self._cost = RemoteCost()
        self._process_started_s: float | None = None
        self._has_served = False
        self._was_away = False
        self.isolation_failures = 0
        """Answers whose prompts came from a cache that their requests were to share with nobody."""
        self._misconfigured = 0
        self._held_until_s = float("-inf")
        self._scope = AsyncExitStack()
        self._closed = False

    async def __aenter__(self) -> RemoteReplica:
        async with AsyncExitStack() as scope:
            headers = {
                **self._authorization,
                "content-type": "application/json",
                "accept-encoding": "identity",
            }
            self._connections = await scope.enter_async_context(
                Connections(self._url, headers, self.max_running)
            )
            probe_headers = {**self._authorization, "accept-encoding": "identity"}
            getter = await scope.enter_async_context(Getter(self._url, probe_headers))
            self._prober = Prober(
                ProbeTarget(self._url, self.engine, self.served_model),
                getter,
                times=self.times.probes,
                random=self._random,
                heard_since=lambda since_s: self._connections.last_heard_s > since_s,
                on_health=self._note_health,
                on_load=self._note_load,
            )
            probing = asyncio.create_task(self._prober.run())
            scope.push_async_callback(end_task, probing)
            probing.add_done_callback(self._probing_ended)
            self._scope = scope.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop probing and cut off what is still running there. Idempotent."""
        self._closed = True
        self._set_health(Health(Condition.DOWN, "closed"))
        await self._scope.aclose()

    async def probed(self) -> None:
        """Wait until it is known how the server is."""
        await self._prober.probed.wait()

    def health(self) -> Health:
        """As the probes, or a refusal of our key or model, last said."""
        return self._health

    def coefficients(self) -> Coefficients:
        """As its answers have shown them."""
        return self._cost.coefficients()

    def exchange(
        self, path: str, body: bytes, headers: Mapping[str, str], patience: Patience
    ) -> Exchange:
        """Send a body to one of its endpoints; see `Exchange`."""
        return self._connections.exchange(path, body, headers, patience)

    def succeeded(
        self,
        receipt: Receipt,
        *,
        ttft_s: float | None,
        cached_tokens: int | None,
        token_gap_s: float | None,
    ) -> None:
        """An answer came to its end. `ttft_s` is from sending it to its first token, if that could
        be seen, `cached_tokens` in the unit of the receipt, `token_gap_s` the mean time between two
        tokens."""
        self._misconfigured = 0
        candidate = receipt.candidate
        if ttft_s is not None:
            cached = candidate.cached.tokens if cached_tokens is None else cached_tokens
            uncached = max(1, receipt.request.prompt_tokens - cached)
            self._cost.observe_first_token(uncached, candidate.standing.pending_tokens, ttft_s)
        if token_gap_s is not None:
            self._cost.observe_next_tokens(self.own_load.running, token_gap_s)

    def kept_nobody_apart(self) -> None:
        """A prompt that shares KV with nobody came from the cache there: the server passes over
        what keeps tenants apart, for all of them. Said once, and counted."""
        self.isolation_failures += 1
        if self.isolation_failures == 1:
            _log.error(
                "remote replica does not keep tenants apart in its prompt cache",
                replica=self.name,
                engine=self.engine,
                reason="a request that shares with nobody was told to have cached tokens: see "
                "whether this version of the server honours cache salts",
            )

    def lost(self, error: UpstreamLost, request_id: str) -> None:
        """A request was lost there: it is logged, and the server probed at once."""
        _log.warning(
            "remote replica lost a request",
            replica=self.name,
            kind=str(error.kind),
            status=error.status,
            request_id=request_id,
        )
        self._prober.soon()

    def away(self) -> None:
        """It says that it takes nothing now: it is probed at once."""
        self._prober.soon()

    def misconfigured(self, status: int) -> None:
        """It does not know our key or the model: nothing goes there until a probe finds that it
        does, and the longer not the more often that turns out not to help.

        Of what may as well be about one request, such as a 403 of a filter of prompts, the probe
        alone decides: no client closes a model to others.
        """
        self._prober.soon()
        if status not in _ABOUT_US:
            return
        hold_s = 0.0 if not self._misconfigured else 0.5 * 2.0 ** min(self._misconfigured, 10)
        self._misconfigured += 1
        self._held_until_s = monotonic() + min(hold_s, _LONGEST_HOLD_S)
        self._set_health(
            Health(Condition.DOWN, f"answers {status}: check its url, key and model's name")
        )

    def _note_health(self, found: Health, silent_since_s: float | None) -> None:
        if found.condition is Condition.SERVING:
            if monotonic() < self._held_until_s:
                return
            if self._was_away and self._process_started_s is None:
                # it does not tell whether it is the same process: better cold than wrongly warm
                self._restarted()
            self._has_served = True
            self._was_away = False
        else:
            self._was_away = self._has_served
            if silent_since_s is not None:
                # what was silent all the while will not speak any more
                self._connections.cut_silent(silent_since_s, LossKind.DOWN)
        self._set_health(found)

    def _note_load(self, load: ReportedLoad) -> None:
        started_s = load.started_s
        if started_s is not None and started_s != self._process_started_s:
            if self._process_started_s is not None:
                self._restarted()
            self._process_started_s = started_s
        own = self.own_load
        self._on_load(foreign_load(load, own.waiting, own.running, int(own.mean_prompt_tokens)))

    def _restarted(self) -> None:
        _log.info("remote replica has restarted", replica=self.name)
        self._on_restart()

    def _set_health(self, health: Health) -> None:
        if self._closed and health.reason != "closed":
            return
        before, self._health = self._health, health
        if before == health:
            return
        log = _log.warning if health.condition is Condition.DOWN else _log.info
        if not self._closed:
            log(
                "remote replica",
                replica=self.name,
                condition=str(health.condition),
                reason=health.reason,
            )
        if before.condition is not health.condition:
            self._on_change()

    def _probing_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("probing failed", replica=self.name, error=repr(error))
            self._set_health(Health(Condition.DOWN, "it can no longer be probed"))


def _nothing() -> None:
    return


def _nothing_about(_: Standing) -> None:
    return


async def open_remote_replica(
    model: str,
    settings: RemoteSettings,
    environ: Mapping[str, str],
    *,
    on_change: Callable[[], None],
    on_load: Callable[[Standing], None] = _nothing_about,
    on_restart: Callable[[], None] = _nothing,
    times: RemoteTimes | None = None,
    random: Random | None = None,
) -> RemoteReplica:
    """A replica that is being probed; close it in the end. It is STARTING until a probe has told.

    Callbacks run on the event loop: `on_change` when its condition changes, `on_load` with what
    others have put on it, `on_restart` when what it had cached is probably gone. Raises KeyError if
    the variable that is to hold its key is not in `environ`.
    """
    variable = settings.api_key_env
    replica = RemoteReplica(
        model,
        settings,
        api_key=None if variable is None else environ[variable],
        on_change=on_change,
        on_load=on_load,
        on_restart=on_restart,
        times=times or RemoteTimes(),
        random=random or Random(),
    )
    await replica.__aenter__()
    return replica
