"""The configuration in use, and its replacement while running: all of it or nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from pydantic import BaseModel

from gateway.config_file import load_settings
from gateway.credentials import admin_key_digest, build_key_ring, check_remote_keys
from gateway.metrics import Metrics
from gateway.registry.merging import Merged, merge
from gateway.registry.records import Overlay
from gateway.settings import Settings
from gateway.settings_errors import ConfigError, UnreadableConfigError
from gateway.tenants import KeyRing

_log = structlog.get_logger("forebay.config")

_RELOADABLE_MODEL_KEYS = ("remote", "aliases", "fallbacks", "replicas.count", "max_queue_s")
_RELOADABLE_MODEL_SECTIONS = ("price",)
_RELOADABLE_SERVER_KEYS = frozenset(
    {"body_limit", "drain_s", "cors_origins", "trusted_proxies", "metrics"}
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One configuration with everything derived from it. Immutable, so that a request that took it
    once is judged by one configuration from beginning to end.

    `admin_key_digest` is the SHA-256 of the operator's key, None if there is none.
    """

    settings: Settings
    key_ring: KeyRing
    admin_key_digest: bytes | None = None


class RuntimeConfig:
    """Holds the snapshot in use: the configuration's own with the tenants and keys laid over it
    that were made at run time. Either part may be replaced, and the other stays.

    Readers take `current` once per request. Belongs to the event loop.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._file = snapshot
        self._overlay = Overlay()
        self._current = snapshot
        self._problems: Mapping[str, str] = {}
        self._shadowed: frozenset[str] = frozenset()

    @property
    def current(self) -> Snapshot:
        """The configuration in use."""
        return self._current

    @property
    def file(self) -> Snapshot:
        """What the configuration itself says, without what was made at run time."""
        return self._file

    @property
    def overlay(self) -> Overlay:
        """What was made at run time."""
        return self._overlay

    @property
    def problems(self) -> Mapping[str, str]:
        """Tenants and keys made at run time that are not in use, by id, and why."""
        return self._problems

    def replace(self, snapshot: Snapshot) -> None:
        """Use another configuration from the next request on, whatever of what was made at run
        time does not fit it."""
        self._use(snapshot, self._overlay, merge(*_parts(snapshot), self._overlay))

    async def use_file(self, snapshot: Snapshot) -> None:
        """Use another configuration from the next request on. Raises ConfigError, with nothing
        changed, if that would put a tenant out of use that was made at run time."""
        while True:
            overlay = self._overlay
            # there may be many keys: not on the event loop
            merged = await asyncio.to_thread(merge, *_parts(snapshot), overlay)
            if overlay is self._overlay:
                break
        tenants = {tenant.id for tenant in overlay.tenants}
        fresh = (merged.problems.keys() - self._problems.keys()) & tenants
        if fresh:
            reasons = ((name, merged.problems[name]) for name in sorted(fresh))
            raise ConfigError([f"tenant {name}, made at run time: {why}" for name, why in reasons])
        self._use(snapshot, overlay, merged)

    async def use_overlay(self, overlay: Overlay) -> None:
        """Use other tenants and keys made at run time from the next request on. One call at a
        time."""
        while True:
            file = self._file
            merged = await asyncio.to_thread(merge, *_parts(file), overlay)
            if file is self._file:
                break
        self._use(file, overlay, merged)

    def _use(self, file: Snapshot, overlay: Overlay, merged: Merged) -> None:
        settings, current = merged.settings, self._current.settings
        # the same object as long as it says the same: keys alone are nothing to follow
        if file is self._file and settings.tenants == current.tenants:
            settings = current
        self._file, self._overlay = file, overlay
        if overlay.empty:
            self._current = file
        else:
            self._current = Snapshot(settings, merged.key_ring, file.admin_key_digest)
        for name in sorted(merged.shadowed - self._shadowed):
            _log.warning(
                "a tenant was made at run time and is in the configuration too, which counts; keys "
                "made at run time stay valid",
                tenant=name,
            )
        for name in sorted(merged.problems.keys() - self._problems.keys()):
            _log.error("made at run time, but not in use", what=name, reason=merged.problems[name])
        self._problems, self._shadowed = merged.problems, merged.shadowed


def _parts(snapshot: Snapshot) -> tuple[Settings, KeyRing]:
    return snapshot.settings, snapshot.key_ring


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """Where a configuration comes from: file (None: the embedded default), environment, flags."""

    path: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, str]

    def load(self) -> Snapshot:
        """Read and validate all of it; raises ConfigError."""
        settings = load_settings(self.path, self.environ, self.flags)
        mistakes: list[str] = []
        with _noted(mistakes):
            check_remote_keys(settings, self.environ)
        with _noted(mistakes):
            key_ring = build_key_ring(settings, self.environ)
        with _noted(mistakes):
            operators = admin_key_digest(settings, self.environ, embedded=self.path is None)
        if mistakes:
            raise ConfigError(mistakes)
        return Snapshot(settings, key_ring, operators)


@contextmanager
def _noted(mistakes: list[str]) -> Iterator[None]:
    """Put a ConfigError's lines into the list, so that what follows is looked at too."""
    try:
        yield
    except ConfigError as error:
        mistakes += error.messages


Apply = Callable[[Settings], Awaitable[None]]


class Reloader:
    """Puts a changed file to use, or says why not and goes on with the last good one."""

    def __init__(self, source: ConfigSource, config: RuntimeConfig, metrics: Metrics) -> None:
        self._source = source
        self._config = config
        self._metrics = metrics
        self._seen = _fingerprint(source.path)
        self._unread = False
        self._one_reads = asyncio.Lock()
        self._one_follows = asyncio.Lock()
        self._apply: Apply | None = None
        self._ended = False
        self._followed = config.current.settings
        """What the fleet was last told, or is opened with."""

    def on_change(self, apply: Apply) -> None:
        """Have `apply` put to use what lies deeper than a request looks. What was reloaded before
        is made up for by the watch."""
        self._apply = apply

    def end(self) -> None:
        """Begin nothing any more: the fleet is going to be closed."""
        self._ended = True

    async def reload(self) -> bool:
        """Read the file again and use it as a whole; True if it is now in use. Never raises."""
        return await self._read() and await self._follow_file()

    async def catch_up(self) -> None:
        """Have the fleet follow what was made at run time."""
        await self._follow()

    async def _read(self) -> bool:
        """Have requests judged by what the file says now; False if that cannot be used."""
        async with self._one_reads:
            if self._ended:
                return False
            self._seen = _fingerprint(self._source.path)
            self._unread = False
            try:
                snapshot = await asyncio.to_thread(self._source.load)
                refuse_restart_changes(self._config.file.settings, snapshot.settings)
                await self._config.use_file(snapshot)
            except ConfigError as error:
                self._unread = isinstance(error, UnreadableConfigError)
                self._metrics.config_loaded("failure", reload=True)
                for message in error.messages:
                    _log.error("config refused, the last good one stays", reason=message)
                return False
            except Exception:  # noqa: BLE001 - a bug in reading must not end the watch over the file
                self._metrics.config_loaded("failure", reload=True)
                _log.exception("config could not be read, the last good one stays")
                return False
            tenants = self._config.current.settings.tenants
            self._metrics.set_tenants(tenant.id for tenant in tenants)
            return True

    async def _follow_file(self) -> bool:
        if not await self._follow():
            self._metrics.config_loaded("failure", reload=True)
            return False
        self._metrics.config_loaded("success", reload=True)
        _log.info("config reloaded", tenants=len(self._config.current.settings.tenants))
        return True

    async def _follow(self) -> bool:
        """Have the fleet do as the latest configuration says, which may take minutes: others can be
        read meanwhile."""
        async with self._one_follows:
            settings = self._config.current.settings
            if self._apply is not None and settings is not self._followed and not self._ended:
                self._followed = settings
                try:
                    await self._apply(settings)
                except Exception:  # noqa: BLE001 - a replica that cannot start ends no watch
                    _log.exception("config is in use, but the fleet could not follow in full")
                    return False
        return True

    async def watch(self, *, interval_s: float = 1.0) -> None:
        """Reload whenever the file has changed, until cancelled.

        Polling sees what notifications miss: an editor that replaces the file, a mounted config map
        that swaps a symlink, a network file system. A change counts once the file looks the same
        twice in a row, so that a half-written one is not read. One that could not be read is read
        once it can be: a permission that is put right, or a disk that answers again, changes no
        file.
        """
        before = self._seen
        async with asyncio.TaskGroup() as following:
            while True:
                await asyncio.sleep(interval_s)
                now = _fingerprint(self._source.path)
                changed = now != self._seen or (self._unread and _can_be_read(self._source.path))
                settled = now is not None and now == before
                if changed and settled and await self._read():
                    following.create_task(self._follow_file())
                elif self._is_behind:
                    following.create_task(self._follow())
                before = now

    @property
    def _is_behind(self) -> bool:
        """A change came while there was no fleet yet to be told of it."""
        return (
            self._apply is not None
            and self._followed is not self._config.current.settings
            and not self._one_follows.locked()
            and not self._ended
        )


def refuse_restart_changes(old: Settings, new: Settings) -> None:
    """Raises ConfigError naming every change that only a restart can bring into effect."""
    changed = [
        f"server.{key}"
        for key in type(old.server).model_fields
        if key not in _RELOADABLE_SERVER_KEYS
        and getattr(old.server, key) != getattr(new.server, key)
    ]
    changed += _differing(old.redis, new.redis, "redis")
    changed += _differing(old.database, new.database, "database")
    if len(old.models) != len(new.models):
        changed.append("models")
    else:
        for index, (before, after) in enumerate(zip(old.models, new.models, strict=True)):
            name = f"models[{index}]"
            reloadable = {f"{name}.{key}" for key in _RELOADABLE_MODEL_KEYS}
            sections = tuple(f"{name}.{key}." for key in _RELOADABLE_MODEL_SECTIONS)
            changed += [
                key
                for key in _differing(before, after, name)
                if key not in reloadable and not key.startswith(sections)
            ]
    if changed:
        raise ConfigError([f"{key}: needs a restart to change" for key in changed])


def _differing(old: BaseModel, new: BaseModel, name: str) -> list[str]:
    keys = []
    for key in type(old).model_fields:
        before: Any = getattr(old, key)
        after: Any = getattr(new, key)
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            keys += _differing(before, after, f"{name}.{key}")
        elif before != after:
            keys.append(f"{name}.{key}")
    return keys


def _fingerprint(path: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file does; None while there is none to read."""
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, status.st_ino)


def _can_be_read(path: Path | None) -> bool:
    if path is None:
        return False
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError:
        return False
    return True
