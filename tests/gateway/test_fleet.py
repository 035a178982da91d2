"""What a reload asks of the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, cast

import pytest

from cache.directory import Directory
from engine.errors import ModelLoadError
from gateway.fleet import Fleet, open_fleet
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.news.fleet_news import LocalNews, RoutedCallback
from gateway.remote.body import read_body
from gateway.remote.isolation import Isolation
from gateway.remote.model import TEXT_IDENTITY, RemoteModel
from gateway.settings import Settings
from policies.routing_policies import AtRandom, LeastLoaded
from tests.gateway.stage import Observer, router_over, tenant

SECRET = b"a server's secret"


@dataclass
class Local:
    """Stands for a model's engines; fails as told, and remembers what it was told."""

    cannot: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)

    async def set_tenants(self, tenants: Any) -> None:
        self._do("tenants")

    async def scale(self, count: int, drain_s: float) -> None:
        self._do(f"scale {count}")

    async def add(self) -> str:
        self._do("add")
        return "n/0"

    def _do(self, what: str) -> None:
        if what in self.cannot:
            raise ModelLoadError(f"cannot {what}")
        self.told.append(what)


@dataclass
class Context:
    redis: Any
    directory: Directory = field(default_factory=Directory)
    metrics: Metrics = field(default_factory=lambda: Metrics(["m"], [], SECRET))
    secret: bytes = SECRET


@dataclass
class Redis:
    named: Any = None
    url: str | None = None
    cluster: bool = False


@dataclass
class Model:
    name: str
    router: Any


def settings(policy: str, count: int = 1) -> Settings:
    one = {"path": "bundled", "replicas": {"count": count}}
    return Settings(
        models=({"name": "m", **one}, {"name": "n", **one}),
        tenants=({"id": "acme", "keys": ({"env": "X"},)},),
        routing={"policy": policy},
    )


def stage() -> tuple[Fleet, Models, dict[str, Local]]:
    models = Models()
    context: Any = Context(Redis())
    fleet = Fleet(settings("random"), models, context, LocalNews(), {})
    local = {"m": Local(), "n": Local()}
    fleet._local.update(local)  # type: ignore[arg-type] # stand-ins
    for name in local:
        router = router_over(name, [], Observer(Metrics([name], [], b"secret")))
        router.use_policy("random", AtRandom())
        model: Any = Model(name, router)
        models.add(model)
    return fleet, models, local


async def test_what_one_model_cannot_follow_is_no_reason_to_leave_out_the_rest() -> None:
    fleet, models, local = stage()
    local["m"].cannot = {"tenants", "scale 2"}
    with pytest.raises(ExceptionGroup) as failed:
        await fleet.apply(settings("round-robin", 2))
    assert [str(each) for each in failed.value.exceptions] == ["cannot tenants", "cannot scale 2"]
    assert local["n"].told == ["tenants", "scale 2"]
    assert [model.router.policy for model in models.values()] == ["round-robin"] * 2


async def test_a_policy_that_did_not_come_to_be_used_is_used_at_the_next_reload() -> None:
    fleet, models, _ = stage()
    models["n"].router.use_policy("least-loaded", LeastLoaded())
    await fleet.apply(settings("random"))
    assert [model.router.policy for model in models.values()] == ["random"] * 2


async def test_an_engine_that_cannot_be_started_is_refused_in_words() -> None:
    fleet, _, local = stage()
    local["n"].cannot = {"add"}
    with pytest.raises(ValueError, match="cannot add"):
        await fleet.add_local("n")
    local["n"].cannot.clear()
    assert await fleet.add_local("n") == "n/0"


def elsewhere(*tenants: dict[str, Any]) -> Settings:
    """A model at a server that is not there; nothing listens at the discard port."""
    remote = {"url": "http://127.0.0.1:9/v1", "engine": "vllm"}
    keys = ({"env": "X"},)
    return Settings(
        models=({"name": "m", "remote": (remote,)},),
        tenants=tuple({"keys": keys, **each} for each in tenants),
    )


async def test_servers_of_all_models_are_waited_for_at_once() -> None:
    fleet, _, _ = stage()
    together = asyncio.Barrier(3)

    class Elsewhere:
        async def probed(self) -> None:
            await together.wait()

    others: Any = {name: Elsewhere() for name in ("x", "y", "z")}
    fleet._remote.update(others)
    async with asyncio.timeout(5):
        await fleet.probed()


async def test_what_was_told_before_a_gateway_came_is_known_when_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though all of it is there at once, and the tokenizer takes a while to load."""
    links = [bytes([i]) * 16 for i in range(4)]
    waited_for: list[float] = []
    left: list[str] = []

    class News(LocalNews):
        async def caught_up(self, within_s: float) -> bool:
            waited_for.append(within_s)
            return True

    @asynccontextmanager
    async def open_news(
        _url: str, _secret: bytes, *, on_routed: RoutedCallback, **_: Any
    ) -> AsyncIterator[News]:
        on_routed("m/127.0.0.1:9", links)
        yield News()
        left.append("news")

    async def probed(_: Fleet) -> None:
        pass

    monkeypatch.setattr("gateway.fleet.open_news", open_news)
    monkeypatch.setattr(Fleet, "probed", probed)
    there = elsewhere({"id": "acme"})
    [model] = there.models
    there = there.model_copy(
        update={"models": (model.model_copy(update={"tokenizer": "bundled"}),)}
    )
    redis: Any = Redis(url="redis://127.0.0.1:9/0")
    async with open_fleet(
        there,
        models=Models(),
        environ={},
        secret=SECRET,
        metrics=Metrics(["m"], [], SECRET),
        progress=lambda *_: None,
        redis=redis,
    ) as fleet:
        assert isinstance(fleet.news, News)
        assert waited_for
        warm = fleet._context.directory.lookup({16: links}, monotonic())
        assert warm["m/127.0.0.1:9"].tokens == 64
        assert not left
    assert left == ["news"]


async def test_what_tenants_left_elsewhere_is_known_before_they_ask_again() -> None:
    body = read_body({"model": "m", "prompt": "hi"}, "completions")
    before = Isolation(SECRET, TEXT_IDENTITY)
    acme, beta = (before.terms(tenant(name), body) for name in ("acme", "beta"))
    both = elsewhere({"id": "acme"}, {"id": "beta", "cache": {"scope": "user"}})
    models, context = Models(), cast(Any, Context(Redis()))
    fleet = Fleet(both, models, context, LocalNews(), {})
    try:
        await fleet.open_model(both.models[0], lambda _: None)
        model = models["m"]
        assert isinstance(model, RemoteModel)
        assert model.isolation.root_of(acme.salt) == acme.chain_root
        assert model.isolation.root_of(beta.salt) is None
        await fleet.apply(elsewhere({"id": "beta"}))
        assert model.isolation.root_of(acme.salt) is None
        assert model.isolation.root_of(beta.salt) == beta.chain_root
    finally:
        await fleet.close()
