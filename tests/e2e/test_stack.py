"""The stack of compose.yaml as processes: its commands, files and environment, with addresses of
this machine and the tiny model; the gateway as two workers on one port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.cache.valkey import Valkey
from tests.deploy.dockerfile import of
from tests.deploy.stack import ROOT, compose, config_path
from tests.e2e.client import CHAT, Client, chat
from tests.e2e.conftest import SECRETS
from tests.e2e.gateway_process import START_S, Metrics, environment, eventually, free_port
from tests.postgres import PASSWORD

MODEL = "smollm2-135m-instruct"
PROMPT = "The same beginning for everybody. " * 8


class Service:
    """One service of ours, started by the constructor as its container would be."""

    def __init__(
        self, name: str, directory: Path, environ: Mapping[str, str], flags: Sequence[str] = ()
    ) -> None:
        service = compose()["services"][name]
        self.port = free_port()
        program, *entry = json.loads(of("ENTRYPOINT")[0])
        command = [str(Path(sys.executable).with_name(program)), *entry]
        self._log = directory / f"{name}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--config", str(config_path(service)), "--host", "127.0.0.1", *flags],
                stdout=log,
                stderr=log,
                env=environment(
                    directory / name,
                    service["environment"]
                    | SECRETS
                    | {"FOREBAY_SERVER__PORT": str(self.port)}
                    | environ,
                ),
                cwd=ROOT,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.output
            return answers(self.port, "/health/ready")

        eventually(ready, START_S, lambda: self.output)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def answers(port: int, path: str) -> bool:
    """Whether a GET is a 200, on a connection of its own."""
    try:
        return (
            httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10, verify=False).status_code == 200
        )
    except httpx.TransportError:
        return False


def requests(port: int) -> float:
    """How many chats a process has answered, by its own count."""
    return metrics(port).total("forebay_requests_total", endpoint="chat", outcome="success")


def metrics(port: int) -> Metrics:
    return Metrics(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10, verify=False).text)


@dataclass(frozen=True, slots=True)
class Stack:
    workers: list[Service]
    gateway: Service
    own_ports: list[int]

    def ask(self, prompt: str) -> tuple[str, int]:
        """One answer, over a connection of its own, and how many prompt tokens were cached."""
        key = compose()["services"]["gateway-1"]["environment"]["DEMO_KEY"]
        with httpx.Client(base_url=f"http://127.0.0.1:{self.gateway.port}", timeout=60) as http:
            body = chat(prompt, MODEL, max_tokens=8, ignore_eos=True)
            streamed = Client(http, key).stream(
                CHAT, body | {"stream_options": {"include_usage": True}}
            )
        assert streamed.done, streamed.events
        usage = streamed.events[-1]["usage"]
        return streamed.text(), usage["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def stack(tmp_path: Path, tiny: Path, valkey: Valkey, postgres_url: str) -> Iterator[Stack]:
    redis = {"FOREBAY_REDIS__URL": valkey.url}
    runs_tiny = redis | {
        "FOREBAY_MODELS__0__PATH": str(tiny),
        "FOREBAY_MODELS__0__DTYPE": "float32",
        "FOREBAY_MODELS__0__REPLICAS__THREADS": "1",
        "FOREBAY_MODELS__0__CACHE__DEVICE": "32MiB",
        "FOREBAY_MODELS__0__CACHE__DRAM": "32MiB",
    }
    with ExitStack() as held:
        workers = []
        for name in ("worker-1", "worker-2"):
            workers.append(Service(name, tmp_path, runs_tiny))
            held.callback(workers[-1].close)
        reaches = {
            f"FOREBAY_MODELS__0__REMOTE__{index}__URL": f"http://127.0.0.1:{worker.port}/v1"
            for index, worker in enumerate(workers)
        }
        own = {
            "FOREBAY_DATABASE__URL": postgres_url,
            "FOREBAY_MODELS__0__TOKENIZER": str(tiny),
        }
        first = two_free_ports()
        gateway = Service(
            "gateway-1",
            tmp_path,
            redis | reaches | own,
            ("--workers", "2", "--worker-ports", str(first)),
        )
        held.callback(gateway.close)
        for service in (*workers, gateway):
            service.until_ready()
        for port in (first, first + 1):
            eventually(lambda port=port: answers(port, "/health/ready"), 20)
        yield Stack(workers, gateway, [first, first + 1])


def two_free_ports() -> int:
    """The first of two free ports in a row."""
    while True:
        first = free_port()
        with ExitStack() as held:
            try:
                probe = held.enter_context(socket.socket())
                probe.bind(("127.0.0.1", first + 1))
            except (OSError, OverflowError):
                continue
        return first


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_stack_answers_counts_and_survives_a_lost_gateway(stack: Stack) -> None:
    asked = 6
    texts = [stack.ask(PROMPT) for _ in range(asked)]
    assert len({text for text, _ in texts}) == 1
    assert texts[-1][1] > 0

    by_gateways = [requests(port) for port in stack.own_ports]
    assert sum(by_gateways) == asked
    assert sum(requests(worker.port) for worker in stack.workers) == asked
    first_tokens = [metrics(port).total("forebay_ttft_seconds_count") for port in stack.own_ports]
    assert first_tokens == by_gateways

    parent = stack.gateway.process.pid
    before = children(parent)
    os.kill(before[0], signal.SIGKILL)
    eventually(lambda: len(children(parent)) == 2 and before[0] not in children(parent), 20)
    for port in stack.own_ports:
        eventually(lambda port=port: answers(port, "/health/ready"), 30)
    assert stack.ask(PROMPT)[0] == texts[0][0]

    # Nobody is left behind by a parent that dies.
    stack.gateway.process.kill()
    for port in stack.own_ports:
        eventually(lambda port=port: not answers(port, "/health/live"), 20)
    for worker in stack.workers:
        worker.process.send_signal(signal.SIGTERM)
        assert worker.process.wait(30) == 0
    for service in (*stack.workers, stack.gateway):
        secrets = compose()["services"]["gateway-1"]["environment"] | SECRETS
        assert not [name for name, secret in secrets.items() if secret in service.output]
        assert PASSWORD not in service.output
