"""Starting a peer: ready, dead at the start, silent, missing, wrongly asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.forebay_server import MODEL, free_port
from loadtest.peers.catalog import ENGINES, ROUTERS
from loadtest.peers.install import place_of
from loadtest.peers.peer import HOST, Launch
from loadtest.peers.place import PeerError
from loadtest.peers.running import running_peer, started
from loadtest.wire.connection import Endpoint, ExchangeError, fetch
from tests.loadtest.peers.fake_programs import SERVER, SLEEP, python

KEY = "a-key-of-a-peer"
SOON_S = 10.0


def launch(script: str, port: int, ready_s: float = SOON_S) -> Launch:
    return Launch(python(script, str(port)), "/ready", ready_s, {"FAKE_KEY": KEY})


def endpoint(port: int) -> Endpoint:
    return Endpoint(HOST, port, "/v1", key=KEY)


async def test_a_ready_peer_is_a_target_and_goes_with_its_scope() -> None:
    port = free_port()
    async with started("fake", launch(SERVER, port), endpoint(port), to_terminal=False) as peer:
        assert (peer.target.name, peer.target.model) == ("fake", MODEL)
        assert peer.target.endpoint.port == port
        assert (await fetch(peer.target.endpoint, "GET", "/ready")).status == 200
        assert peer.process.poll() is None
        assert peer.start_s < SOON_S
    assert peer.process.poll() is not None
    with pytest.raises(ExchangeError):
        await fetch(endpoint(port), "GET", "/ready")


@pytest.mark.parametrize(
    ("script", "ready_s", "why"),
    [
        ("print('no model'); raise SystemExit(3)", SOON_S, "ended with code 3\n  no model$"),
        (SLEEP, 0.3, "not ready within 0.3 s"),
        (SERVER.replace("/ready ", "/never "), 0.3, "within 0.3 s\n  the log says so$"),
    ],
    ids=["dies", "hangs", "never ready"],
)
async def test_a_peer_that_does_not_come_up_is_told_with_its_log(
    script: str, ready_s: float, why: str
) -> None:
    port = free_port()
    with pytest.raises(PeerError, match=why) as told:
        async with started(
            "fake", launch(script, port, ready_s), endpoint(port), to_terminal=False
        ):
            raise AssertionError("it is not ready")
    assert KEY not in str(told.value)


async def test_a_program_that_is_missing_is_told(tmp_path: Path) -> None:
    gone = Launch((str(tmp_path / "gone"),), "/ready", SOON_S)
    with pytest.raises(PeerError, match=r"No such file or directory.*install it again"):
        async with started("fake", gone, endpoint(1), to_terminal=False):
            raise AssertionError("there is no such program")


def test_keys_are_not_shown_with_a_launch() -> None:
    assert KEY not in repr(launch(SERVER, 1))


@pytest.mark.parametrize(
    ("name", "asked", "why"),
    [
        ("vllm", {}, "install vllm --into"),
        ("vllm", {"upstreams": [endpoint(1)]}, "an engine and stands before nobody"),
        ("smg", {}, "needs upstreams"),
        ("smg", {"threads": 2, "upstreams": [endpoint(1)]}, "no model, threads or key"),
        ("smg", {"upstreams": [endpoint(1)]}, "install smg --into"),
        ("nobody", {}, "no such peer; there are vllm, "),
    ],
)
async def test_what_a_peer_cannot_do_is_refused(
    name: str, asked: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(PeerError, match=why):
        async with running_peer(name, **asked, root=tmp_path, tell=print):
            raise AssertionError("it cannot run")


async def test_a_router_needs_one_key_for_all_upstreams(tmp_path: Path) -> None:
    smg = ROUTERS["smg"]
    place = place_of(smg, tmp_path)
    place.root.mkdir()
    place.mark_installed(smg.recipe)
    upstreams = [endpoint(1), Endpoint(HOST, 2, "/v1", key="another")]
    with pytest.raises(PeerError, match="upstreams want several"):
        async with running_peer("smg", upstreams=upstreams, root=tmp_path, tell=print):
            raise AssertionError("it cannot run")


async def test_another_versions_installation_is_not_started(tmp_path: Path) -> None:
    place = place_of(ENGINES["llama.cpp"], tmp_path)
    place.root.mkdir()
    place.mark_installed("llama-cpp-python==0.0.1")
    with pytest.raises(PeerError, match="of another version in"):
        async with running_peer("llama.cpp", root=tmp_path, tell=print):
            raise AssertionError("it is out of date")
