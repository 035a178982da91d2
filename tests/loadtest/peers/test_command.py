"""`python -m loadtest.peers`: what it prints, writes and exits with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from loadtest.bench.campaign import Report
from loadtest.bench.measure import PassFigures, Repetition
from loadtest.peers import command
from loadtest.peers.place import PeerError
from loadtest.peers.relaying import RelayFigure
from loadtest.stats.distribution import Distribution

TIMES = Distribution.of([10.0, 20.0])
assert TIMES is not None


def report(name: str, failures: tuple[str, ...] = ()) -> Report:
    passes = (PassFigures("all", TIMES, TIMES, TIMES, 128, 0, 1.0),)
    repetition = Repetition("W1", 1, 4, 2.0, 512, passes, failures)
    return Report(name, "small", (repetition,), None)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed", lambda *_: None)


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(command.app, [str(one) for one in arguments])


@pytest.mark.usefixtures("all_installed")
def test_engines_and_routers_have_a_table_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, list[str], int]] = []

    async def engine(name: str, workloads: Any, *, repeats: int, **_: Any) -> list[Report]:
        asked.append((name, [one.name for one in workloads], repeats))
        return [report("forebay"), report(name)]

    async def routers(names: list[str], **_: Any) -> list[RelayFigure]:
        asked.append((",".join(names), [], 0))
        return [
            RelayFigure(name, "JSON", at, TIMES, 0.0, 1.0, None)
            for name in ("direct", *names)
            for at in (1, 32)
        ]

    monkeypatch.setattr(command, "compare_engine", engine)
    monkeypatch.setattr(command, "compare_routers", routers)
    path = tmp_path / "found.json"
    names = ("smg", "vllm", "llama.cpp", "vllm")
    found = invoke(
        *("compare", *names, "--workloads", "w1", "--repeats", "2"), "--markdown", "--json", path
    )

    assert found.exit_code == 0, found.output
    assert asked == [("vllm", ["W1"], 2), ("llama.cpp", ["W1"], 2), ("smg", [], 0)]
    assert "| cell | forebay (range) | vllm (range) | lead over vllm |" in found.output
    assert "| W1 output tok/s | 256 (256–256) | 256 (256–256) | 1.00× |" in found.output
    assert "\n| smg | " in found.output
    document = orjson.loads(path.read_bytes())
    assert list(document["beside"]) == ["vllm", "llama.cpp"]
    assert document["beside"]["vllm"]["leads"][0]["factor"] == 1.0
    assert [one["through"] for one in document["relaying"]] == ["direct", "direct", "smg", "smg"]


@pytest.mark.usefixtures("all_installed")
def test_a_failed_request_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async def engine(name: str, workloads: Any, **_: Any) -> list[Report]:
        return [report("forebay"), report(name, ("W1: status 500: no",))]

    monkeypatch.setattr(command, "compare_engine", engine)
    found = invoke("compare", "vllm")
    assert found.exit_code == 1
    assert "W1: status 500: no" in found.output


@pytest.mark.usefixtures("all_installed")
def test_what_was_found_is_kept_when_the_next_peer_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def engine(name: str, workloads: Any, **_: Any) -> list[Report]:
        if name == "llama.cpp":
            raise PeerError("llama.cpp ended with code 1")
        return [report("forebay"), report(name)]

    monkeypatch.setattr(command, "compare_engine", engine)
    path = tmp_path / "found.json"
    found = invoke("compare", "vllm", "llama.cpp", "--json", path)
    assert found.exit_code == 1
    assert "loadtest.peers: llama.cpp ended with code 1" in found.output
    assert list(orjson.loads(path.read_bytes())["beside"]) == ["vllm"]


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("compare", "nginx"), 2, "no such peer"),
        (("compare", "vllm", "--workloads", "W9"), 2, "no such workload"),
        (("compare", "vllm"), 1, "python -m loadtest.peers install vllm --into"),
        (("serve", "smg", "--port", "1", "--upstream", "ftp://x"), 2, "must look like"),
        (("serve", "nginx", "--port", "1"), 1, "no such peer"),
        (("serve", "vllm", "--port", "1"), 1, "python -m loadtest.peers install vllm --into"),
        (("install", "nginx"), 1, "no such peer"),
    ],
)
def test_wrong_use_and_what_is_missing_are_told(
    arguments: tuple[str, ...], code: int, why: str, tmp_path: Path
) -> None:
    found = invoke(*arguments, "--into", tmp_path)
    assert found.exit_code == code
    assert why in " ".join(found.output.replace("│", " ").split())


def test_installing_an_engine_also_converts_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []

    class Engine:
        name = home = "vllm"
        recipe = "1"

        def install(self, workshop: Any) -> None:
            done.append(f"install in {workshop.place.root.name}")

        def prepare(self, workshop: Any, model: Path) -> Path:
            done.append(f"prepare {model.name}")
            return model

    engine: Any = Engine()
    monkeypatch.setitem(command.ENGINES, "vllm", engine)
    monkeypatch.setattr(command, "bundled_gguf", lambda: Path("m.gguf"))
    assert invoke("install", "vllm", "--into", tmp_path).exit_code == 0
    assert done == ["install in vllm", "prepare m.gguf"]

    def gone() -> Path:
        raise PeerError("the bundled model is not installed")

    monkeypatch.setattr(command, "bundled_gguf", gone)
    found = invoke("install", "vllm", "--into", tmp_path)
    assert (found.exit_code, done[2:]) == (1, [])
