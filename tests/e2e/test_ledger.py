"""The ledger of a gateway whose workers die and whose clients leave: it says what was computed."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client import ACME_KEY, CHAT, COMPLETIONS, chat, completion, reset, sent
from tests.e2e.conftest import KEYS, SECRETS
from tests.e2e.fleet_stage import STREAMS, caller, reading, story, told, worker_pids
from tests.e2e.gateway_process import GatewayProcess, Metrics, eventually

CONFIG = """
server: {port: PORT, log_level: info, log_format: json}
models:
  - {name: m, path: "TINY", dtype: float32, max_context: 1024,
     replicas: {kind: process, count: 2, threads: 1}, cache: {device: 64MiB},
     price: {input: 1, cached_input: 0.5, output: 2}}
tenants:
  - {id: acme, keys: [{env: ACME_KEY}], class: interactive, slo: {ttft_ms: 60000}}
  - {id: ac, keys: [{env: AC_KEY}]}
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ledger")


@pytest.fixture(scope="module")
def ledgered(directory: Path, tiny: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(directory, CONFIG.replace("TINY", str(tiny)), KEYS | SECRETS) as process:
        yield process.until_ready()


def rows(directory: Path, where: str = "1 = 1") -> list[dict[str, Any]]:
    """The ledger, in the order of ends."""
    with sqlite3.connect(directory / "state" / "forebay.sqlite") as database:
        database.row_factory = sqlite3.Row
        found = database.execute(f"SELECT * FROM requests WHERE {where} ORDER BY finished_s")
        return [dict(row) for row in found]


def answered(metrics: Metrics) -> float:
    """Requests that reached an engine."""
    outcomes = ("success", "cancelled", "error", "unavailable", "expired")
    return sum(metrics.total("forebay_requests_total", outcome=outcome) for outcome in outcomes)


def test_rows_add_up_to_what_was_computed_whatever_happened(
    ledgered: GatewayProcess, directory: Path
) -> None:
    with caller(ledgered) as http:
        headers = {"Authorization": f"Bearer {ACME_KEY}"}
        usages = []
        for body in (
            completion("One.", max_tokens=8),
            completion("x" * 64, max_tokens=4),
            completion("x" * 64, max_tokens=4),
            chat("Two.", max_tokens=8, n=2),
            completion("Three.", max_tokens=0, echo=True, logprobs=1),
        ):
            path = CHAT if "messages" in body else COMPLETIONS
            answer = http.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            usages.append((answer.headers["x-request-id"], answer.json()["usage"]))
        # refused: none of these is let in
        assert http.post(COMPLETIONS, json=completion("x", model="no"), headers=headers).is_error
        assert http.post(COMPLETIONS, json=completion("x" * 5000), headers=headers).is_error
    with reading(ledgered, [story(n, 800) for n in range(STREAMS)]) as streams:
        streams.until_begun()
        os.kill(worker_pids(ledgered)[0], signal.SIGKILL)
        finished = [told(each) for each in streams.results()]
    for _ in range(3):
        leave_after_three_events(ledgered)
    ledgered.until_idle(10)
    metrics = ledgered.metrics()
    eventually(lambda: len(rows(directory)) == answered(ledgered.metrics()), 5)

    written = rows(directory)
    by_id = {row["request_id"]: row for row in written}
    assert len(by_id) == len(written), "a row more than once"
    for request_id, usage in usages:
        row = by_id[request_id]
        assert row["prompt_tokens"] == usage["prompt_tokens"]
        assert row["output_tokens"] == usage["completion_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached_tokens(row) == cached
        uncached = usage["prompt_tokens"] - cached
        cost = uncached * 1000 + cached * 500 + usage["completion_tokens"] * 2000
        assert row["cost_nusd"] == cost
    assert any(cached_tokens(row) for row in written)
    streamed = [row for row in written if row["streamed"] and row["outcome"] == "success"]
    assert sorted(row["output_tokens"] for row in streamed) == sorted(
        each.completion_tokens for each in finished
    )
    left = [row for row in written if row["outcome"] == "cancelled"]
    assert len(left) == 3
    assert all(0 < row["output_tokens"] < 900 for row in left)
    for column, metric in (
        ("prompt_tokens", "forebay_prompt_tokens_total"),
        ("output_tokens", "forebay_generated_tokens_total"),
    ):
        assert sum(row[column] for row in written) == metrics.total(metric)
    assert sum(map(cached_tokens, written)) == metrics.total("forebay_cached_tokens_total")
    assert all(row["met_slo"] == 1 for row in written if row["outcome"] == "success")


def test_what_was_settled_a_second_ago_survives_a_kill(
    ledgered: GatewayProcess, directory: Path
) -> None:
    with caller(ledgered) as http:
        headers = {"Authorization": f"Bearer {ACME_KEY}"}
        answer = http.post(
            COMPLETIONS, json=completion("Last words.", max_tokens=4), headers=headers
        )
        assert answer.status_code == 200
    request_id = answer.headers["x-request-id"]
    eventually(lambda: rows(directory, f"request_id = '{request_id}'"), 1.0)
    ledgered.send(signal.SIGKILL)
    ledgered.exit_code()
    assert len(rows(directory, f"request_id = '{request_id}'")) == 1


def leave_after_three_events(gateway: GatewayProcess) -> None:
    body = completion("Leaves.", max_tokens=900, ignore_eos=True, stream=True)
    with sent(gateway.port, ACME_KEY, COMPLETIONS, body) as connection:
        heard = b""
        while heard.count(b"data: ") < 3:
            heard += connection.recv(4096)
        reset(connection)


def cached_tokens(row: dict[str, Any]) -> int:
    return sum(row[f"cached_{tier}_tokens"] for tier in ("device", "dram", "redis"))
