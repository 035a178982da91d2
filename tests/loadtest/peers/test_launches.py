"""The command lines of the peers, and what their environments hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.peers import vllm_cpu
from loadtest.peers.catalog import ENGINES, ROUTERS
from loadtest.peers.peer import Launch
from loadtest.peers.place import Place, default_root
from loadtest.wire.connection import Endpoint

PLACE = Place(Path("/peers/one"))
KEY = "a-key-of-a-peer"


def engine(name: str, key: str | None = KEY, threads: int = 2) -> Launch:
    model = Path("/models/m")
    return ENGINES[name].launch(
        PLACE, model=model, served_as="small", threads=threads, port=9101, key=key
    )


def after(launch: Launch, flag: str) -> str:
    return launch.command[launch.command.index(flag) + 1]


@pytest.mark.parametrize(
    ("name", "key_variable", "served_as"),
    [
        ("vllm", "VLLM_API_KEY", "--served-model-name"),
        ("llama.cpp", "LLAMA_API_KEY", "--alias"),
        ("llama.cpp-bf16", "LLAMA_API_KEY", "--alias"),
    ],
)
def test_an_engine_gets_its_key_by_environment(
    name: str, key_variable: str, served_as: str
) -> None:
    closed, open_to_all = engine(name), engine(name, key=None)
    assert closed.environment[key_variable] == KEY
    assert key_variable not in open_to_all.environment
    assert closed.command == open_to_all.command
    assert KEY not in " ".join(closed.command)
    assert "/models/m" in closed.command
    assert after(closed, served_as) == "small"
    assert (after(closed, "--host"), after(closed, "--port")) == ("127.0.0.1", "9101")


def test_vllm_is_bound_to_as_many_cores_as_it_has_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_cpu, "usable_cores", lambda: [1, 4, 6])
    assert engine("vllm").environment["VLLM_CPU_OMP_THREADS_BIND"] == "1,4"
    assert engine("vllm", threads=9).environment["VLLM_CPU_OMP_THREADS_BIND"] == "1,4,6"


def test_vllm_compiles_into_its_own_directory() -> None:
    assert engine("vllm").environment["VLLM_CACHE_ROOT"] == "/peers/one/cache"


def test_vllm_preloads_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_cpu.ctypes.util, "find_library", lambda _: None)
    assert "LD_PRELOAD" not in engine("vllm").environment

    openmp = tmp_path / "venv" / "lib" / "libiomp5.so"
    openmp.parent.mkdir(parents=True)
    openmp.touch()
    monkeypatch.setattr(vllm_cpu.ctypes.util, "find_library", lambda name: f"lib{name}.so.4")
    assert vllm_cpu.preloads(Place(tmp_path)) == ["libtcmalloc_minimal.so.4", str(openmp)]


def test_llama_cpp_has_as_many_threads_for_prompts() -> None:
    launch = engine("llama.cpp", threads=3)
    assert (after(launch, "--threads"), after(launch, "--threads-batch")) == ("3", "3")


@pytest.mark.parametrize("name", list(ROUTERS))
def test_a_router_stands_before_its_upstreams(name: str) -> None:
    upstreams = [
        Endpoint("127.0.0.1", 1, "/v1", key=KEY),
        Endpoint("engines", 2, "/v1", tls=True, key=KEY),
    ]
    launch = ROUTERS[name].launch(PLACE, upstreams=upstreams, port=9102, metrics_port=9103)
    assert launch.command[0] == f"/peers/one/venv/bin/{name}"
    assert launch.command[-3:] == ("--worker-urls", "http://127.0.0.1:1", "https://engines:2")
    assert after(launch, "--port") == "9102"
    assert after(launch, "--prometheus-port") == "9103"
    assert after(launch, "--policy") == "cache_aware"
    assert KEY not in repr(launch.command)


def test_peers_lie_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOREBAY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_root() == Path.home() / ".cache" / "forebay" / "peers"
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_root() == Path("/cache/forebay/peers")
    monkeypatch.setenv("FOREBAY_CACHE_DIR", "/own")
    assert default_root() == Path("/own/peers")
