"""Whether a remote server is up, has the model, and how busy it is: asked every other second."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import monotonic

import orjson

from gateway.dispatch.member import Condition, Health
from gateway.remote.failures import UpstreamLost
from gateway.remote.getting import Getter
from gateway.remote.pool import Origin
from gateway.remote.reported_load import MAX_PAGE_BYTES, TELLS_LOAD, ReportedLoad, parse_load
from gateway.remote.wire import WireLost
from gateway.settings_fleet import RemoteEngine

_MODELS_BYTES = 4 << 20
_FAILURES_TO_DOWN = 2
_LEAST_GAP_S = 0.1
_MODELS_AGAIN_S = 30.0
_MOST_UNREAD = 5
"""Probes in a row: what a server has last said of its load is of use for a while, since a page may
be late because there is so much of it."""
_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class ProbeTimes:
    """Seconds: between two probes of a server that is well, at most between two of one that is
    not, and how long to wait for an answer."""

    every_s: float = 2.0
    slowest_s: float = 10.0
    timeout_s: float = 2.0


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """What is probed. `url` ends before `/models`; `served_model` is what must be among them."""

    url: str
    engine: RemoteEngine
    served_model: str

    @property
    def base_path(self) -> str:
        """Where the API begins; health and metrics are at the server's root."""
        return Origin.of(self.url).base_path


class _Unwell(Exception):
    """The probe's answer is that the server is not to be used; it says why. `silent`: there was
    no answer at all."""

    def __init__(self, reason: str, *, silent: bool = False) -> None:
        super().__init__(reason)
        self.silent = silent


class Prober:
    """Probes one server until its task is cancelled.

    Two failures in a row are DOWN, a success is SERVING. A probe without an answer does not count
    while requests are being answered there: that is load, not death.
    """

    def __init__(
        self,
        target: ProbeTarget,
        getter: Getter,
        *,
        times: ProbeTimes,
        random: Random,
        heard_since: Callable[[float], bool],
        on_health: Callable[[Health, float | None], None],
        on_load: Callable[[ReportedLoad], None],
    ) -> None:
        """`heard_since(t)`: whether any answer's bytes came after `t`. `on_health` is told what a
        probe found, and since when the server has been silent if it did not answer at all."""
        self._target = target
        self._getter = getter
        self._times = times
        self._random = random
        self._heard_since = heard_since
        self._on_health = on_health
        self._on_load = on_load
        self._wake = asyncio.Event()
        self._failures = 0
        self._models_due_s = float("-inf")
        self._tells_load = target.engine in TELLS_LOAD
        self._unread = 0
        self.probed = asyncio.Event()
        """Set once it is known how the server is."""

    def soon(self) -> None:
        """Look again at once: something was lost there."""
        self._models_due_s = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            self._wake.clear()
            started_s = monotonic()
            await self._probe(started_s)
            await self._pause()

    async def _probe(self, started_s: float) -> None:
        try:
            await self._check()
        except _Unwell as unwell:
            self._models_due_s = float("-inf")
            if unwell.silent and self._heard_since(started_s):
                return
            self._failures += 1
            if self._failures >= _FAILURES_TO_DOWN:
                # it may come back as another process, that tells more, or has nothing to do
                self._tells_load = self._target.engine in TELLS_LOAD
                self._unread = _MOST_UNREAD
                silent_since_s = started_s if unwell.silent else None
                self._on_health(Health(Condition.DOWN, str(unwell)), silent_since_s)
                self.probed.set()
            return
        self._failures = 0
        self._on_health(Health(Condition.SERVING), None)
        self.probed.set()
        if self._tells_load:
            await self._read_load()

    async def _pause(self) -> None:
        if self._failures == 0:
            delay_s = self._times.every_s
        elif self._failures < _FAILURES_TO_DOWN:
            delay_s = self._times.every_s / 4
        else:
            doubled_s = self._times.every_s * 2.0 ** min(self._failures - _FAILURES_TO_DOWN, 10)
            delay_s = min(doubled_s, self._times.slowest_s)
        delay_s *= self._random.uniform(1 - _JITTER, 1 + _JITTER)
        await asyncio.sleep(min(_LEAST_GAP_S, delay_s))
        try:
            async with asyncio.timeout(delay_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _check(self) -> None:
        if self._target.engine == "forebay":
            status, _ = await self._get("/health/ready", 64 << 10)
            if status == 503:
                raise _Unwell("is not ready")
            # behind a proxy there may be nothing but /v1
            if status == 200 and monotonic() < self._models_due_s:
                return
        status, body = await self._get(f"{self._target.base_path}/models", _MODELS_BYTES)
        if status in (401, 403):
            raise _Unwell("refuses its key")
        if status == 404 and self._target.engine == "openai":
            return  # some servers have no list
        if status != 200:
            raise _Unwell(f"answers {status} when asked for its models")
        self._require_model(body)
        self._models_due_s = monotonic() + _MODELS_AGAIN_S

    def _require_model(self, body: bytes) -> None:
        names = _model_names(body)
        if names is None:
            raise _Unwell("answers something else than a list of models")
        wanted = self._target.served_model
        # a llama.cpp server with one model runs it under whatever name it is asked for
        if wanted in names or (self._target.engine == "llama.cpp" and len(names) == 1):
            return
        raise _Unwell(f"has no model named {wanted}")

    async def _read_load(self) -> None:
        """What is not said any more is not gone by for ever: then there is nothing."""
        load = await self._told_load()
        if load is None:
            self._unread += 1
            if self._tells_load and self._unread < _MOST_UNREAD:
                return
            load = ReportedLoad(0, 0)
        else:
            self._unread = 0
        self._on_load(load)

    async def _told_load(self) -> ReportedLoad | None:
        try:
            status, page = await self._get("/metrics", MAX_PAGE_BYTES)
        except _Unwell:
            return None
        if status in (401, 403, 404, 405, 501):
            self._tells_load = False  # it has no such page for us
        return parse_load(page, self._target.engine) if status == 200 else None

    async def _get(self, path: str, limit_bytes: int) -> tuple[int, bytes]:
        """Status and body. Raises _Unwell."""
        try:
            async with asyncio.timeout(self._times.timeout_s):
                got = await self._getter.get(path, limit_bytes)
        except TimeoutError:
            raise _Unwell("does not answer in time", silent=True) from None
        except UpstreamLost as lost:
            raise _Unwell(_why_unreached(lost.__cause__)) from None
        except WireLost as lost:
            raise _Unwell(f"breaks off ({lost.kind})") from None
        if got.encoding != "identity":
            raise _Unwell("answers in an encoding that was not asked for")
        if got.body is None:
            raise _Unwell("answers more than a probe can take")
        return got.status, got.body


def _why_unreached(cause: BaseException | None) -> str:
    """Why there is no connection, in words for the operator."""
    if isinstance(cause, socket.gaierror):
        return "has a name that cannot be looked up"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"has a certificate that is not believed ({cause.verify_message})"
    if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
        return "cannot be asked: this gateway has no open files left"
    return "refuses connections"


def _model_names(body: bytes) -> set[str] | None:
    """The ids of a list of models; None if it is none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list):
        return None
    ids = (item.get("id") for item in data if isinstance(item, dict))
    return {name for name in ids if isinstance(name, str)}
