"""A batch of 200 lines whose gateway is stopped and killed, beside a team in a hurry."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, chat
from tests.e2e.conftest import KEYS, SECRETS
from tests.e2e.gateway_process import GatewayProcess, eventually

LINES = 200
TTFT_MS = 1500
CONFIG = """
server: {{port: PORT, log_format: json, drain_s: 2}}
models:
  - {{name: m, path: "{tiny}", dtype: float32, max_context: 1024, max_running: 4,
     replicas: {{threads: 1}}, cache: {{device: 64MiB}},
     price: {{input: 1, output: 2, batch_discount: 0.5}}}}
batch: {{concurrency: 3}}
tenants:
  - {{id: acme, keys: [{{env: ACME_KEY}}], limits: {{rpm: 1}}}}
  - {{id: ac, keys: [{{env: AC_KEY}}], class: interactive, slo: {{ttft_ms: {ttft_ms}}}}}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


def started(directory: Path, tiny: Path) -> GatewayProcess:
    config = CONFIG.format(tiny=tiny, ttft_ms=TTFT_MS)
    return GatewayProcess(directory, config, KEYS | SECRETS).until_ready()


def client_of(gateway: GatewayProcess) -> openai.OpenAI:
    http = httpx.Client(verify=False)
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=ACME_KEY, http_client=http)


def lines() -> bytes:
    """Different prompts, of which the last one cannot be answered."""
    bodies = [
        {
            "custom_id": f"line-{n}",
            "method": "POST",
            "url": CHAT,
            "body": chat(f"Number {n}", max_tokens=48, ignore_eos=True),
        }
        for n in range(LINES)
    ]
    bodies[-1]["body"] = chat("x" * 4000)
    return "\n".join(json.dumps(body) for body in bodies).encode()


class Team:
    """Asks for a short answer again and again, and notes whether it was answered, and when."""

    def __init__(self, directory: Path) -> None:
        self.ttft_ms: list[float] = []
        self.failures: list[str] = []
        self._url = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def ask(self, url: str) -> None:
        """From now on there."""
        self._url = url
        if not self._thread.is_alive():
            self._thread.start()

    def pause(self) -> None:
        """The gateway is about to end."""
        self._url = ""

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {AC_KEY}"}
        with httpx.Client(verify=False, timeout=20) as http:
            while not self._stop.wait(0.05):
                if not (url := self._url):
                    continue
                began = time.monotonic()
                body = chat("Quick!", max_tokens=2, stream=True)
                try:
                    with http.stream("POST", url + CHAT, json=body, headers=headers) as answer:
                        if answer.status_code != 200:
                            self._fail(url, answer.read().decode())
                            continue
                        lines = answer.iter_lines()
                        next(lines)
                        self.ttft_ms.append((time.monotonic() - began) * 1e3)
                        if not any(line == "data: [DONE]" for line in lines):
                            self._fail(url, "the answer broke off")
                except httpx.TransportError as error:
                    self._fail(url, repr(error))

    def _fail(self, url: str, why: str) -> None:
        """What fails while its gateway is being ended is no failure."""
        if self._url == url:
            self.failures.append(why)


def test_a_batch_outlives_its_gateway_beside_interactive_work(directory: Path, tiny: Path) -> None:
    team = Team(directory)
    try:
        with started(directory, tiny) as first, client_of(first) as client:
            file = client.files.create(file=("in.jsonl", lines()), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            team.ask(first.url)
            eventually(lambda: done(client, batch.id) >= 40, 60)
            team.pause()
            first.send(signal.SIGTERM)
            assert first.exit_code() == 0
        with started(directory, tiny) as second, client_of(second) as client:
            before = done(client, batch.id)
            assert 40 <= before < LINES
            team.ask(second.url)
            eventually(lambda: done(client, batch.id) >= before + 30, 60)
            team.pause()
            second.send(signal.SIGKILL)
            second.exit_code()
        with started(directory, tiny) as third, client_of(third) as client:
            team.ask(third.url)
            eventually(lambda: client.batches.retrieve(batch.id).status == "completed", 120)
            team.pause()
            whole = client.batches.retrieve(batch.id)
            usage = httpx.get(
                f"{third.url}/v1/usage", headers={"Authorization": f"Bearer {AC_KEY}"}
            ).json()
            assert whole.output_file_id
            assert whole.error_file_id
            answers = client.files.content(whole.output_file_id).text.splitlines()
            errors = client.files.content(whole.error_file_id).text.splitlines()
    finally:
        team.close()
    counts = whole.request_counts
    assert counts
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES - 1, 1)
    answered = {line["custom_id"]: line for line in map(json.loads, answers)}
    assert len(answered) == len(answers) == LINES - 1
    for line in answered.values():
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 48
    [failed] = map(json.loads, errors)
    assert failed["custom_id"] == f"line-{LINES - 1}"
    assert failed["response"]["status_code"] == 400

    assert not team.failures
    assert len(team.ttft_ms) > 20
    in_time = sum(ms <= TTFT_MS for ms in team.ttft_ms)
    assert in_time >= 0.95 * len(team.ttft_ms), sorted(team.ttft_ms)[-5:]
    assert usage


def done(client: openai.OpenAI, batch_id: str) -> int:
    """Lines that have been answered."""
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts
    return counts.completed + counts.failed
