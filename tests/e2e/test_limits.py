"""What tenants are held to, as clients and operators see it: limits over several gateways whose
clocks differ, places that fall free, refusals that say when to come again, accounts that add up."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from anyio.from_thread import start_blocking_portal

from tests.cache.valkey import running_valkey
from tests.e2e.client import CHAT, chat, sent
from tests.e2e.gateway_process import ROOT, SERVE, GatewayProcess, eventually
from tests.e2e.tenants_stage import (
    CACHED_TOKENS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    Servers,
    TenantsStage,
    held,
    key_of,
    tenants_stage,
)
from tests.e2e.tiers import OPERATOR_KEY, SECRET
from tests.gateway.remote.upstream import answers, breaks_after, streams, usage, whole

LIMIT = 60
OFFERED = 3 * LIMIT
WORKERS = 4
SKEW_S = 45
SENTENCE = "one two three four five six"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[TenantsStage]:
    with tenants_stage(tmp_path_factory.mktemp("tenants"), tiny) as stage:
        yield stage


def skewed(directory: Path, by_s: int) -> dict[str, str]:
    """The environment of processes whose clock is wrong by so many seconds."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import time

            def shifted(clock=time.time):
                return clock() + {by_s}

            def shifted_ns(clock=time.time_ns):
                return clock() + {by_s} * 10**9

            time.time, time.time_ns = shifted, shifted_ns
        """)
    )
    kept = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{directory}{os.pathsep}{kept}" if kept else str(directory)}


@pytest.fixture(scope="module")
def eight_processes(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """Two gateways of four workers each over one Redis, one 45 seconds early and one late."""
    directory = tmp_path_factory.mktemp("eight")
    with ExitStack() as scope:
        portal = scope.enter_context(start_blocking_portal())
        servers = Servers(portal, scope)
        servers.say(answers(200, whole()))
        valkey = scope.enter_context(running_valkey(directory))
        config = f"""
server: {{port: PORT, log_format: json}}
redis: {{url: "{valkey.url}", timeout_ms: 2000}}
models: [{{name: m, remote: [{servers.listed}]}}]
tenants:
  - {{id: limited, keys: [{{env: LIMITED_KEY}}], limits: {{rpm: {LIMIT}}}}}
  - {{id: other, keys: [{{env: OTHER_KEY}}], limits: {{rpm: {LIMIT}}}}}
"""
        gateways = []
        for name, by_s in (("early", SKEW_S), ("late", -SKEW_S)):
            environ = {
                "FOREBAY_SECRET": SECRET,
                "LIMITED_KEY": key_of("limited"),
                "OTHER_KEY": key_of("other"),
                **skewed(directory / f"{name}-clock", by_s),
            }
            command = (*SERVE, "--workers", str(WORKERS))
            process = GatewayProcess(directory / name, config, environ, command)
            gateways.append(scope.enter_context(process))
        for gateway in gateways:
            # the parent says where they serve once all of them are ready
            eventually(lambda: "serves m at" in gateway.output, 60, lambda: gateway.output)  # noqa: B023
        first, second = gateways
        yield first, second


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    return error


def retry_after_s(answer: httpx.Response) -> int:
    """Whole seconds, at least one; asserts that no stream had begun."""
    assert answer.headers["content-type"] == "application/json"
    after = answer.headers["retry-after"]
    assert after.isdigit(), after
    assert int(after) >= 1
    return int(after)


def test_workers_without_a_redis_have_a_part_of_every_limit_each(tmp_path: Path) -> None:
    with ExitStack() as scope:
        servers = Servers(scope.enter_context(start_blocking_portal()), scope)
        servers.say(answers(200, whole()))
        config = f"""
server: {{port: PORT, log_format: json}}
models: [{{name: m, remote: [{servers.listed}]}}]
tenants: [{{id: limited, keys: [{{env: LIMITED_KEY}}], limits: {{rpm: 10}}}}]
"""
        environ = {"FOREBAY_SECRET": SECRET, "LIMITED_KEY": key_of("limited")}
        command = (*SERVE, "--workers", "2")
        gateway = scope.enter_context(GatewayProcess(tmp_path, config, environ, command))
        eventually(lambda: "serves m at" in gateway.output, 60, lambda: gateway.output)
        headers = {"Authorization": f"Bearer {key_of('limited')}"}
        # a connection each, so that both workers get more than their part
        statuses = [
            httpx.post(
                gateway.url + CHAT, json=chat("hi"), headers=headers, verify=False
            ).status_code
            for _ in range(60)
        ]
    assert statuses.count(200) == 10
    assert statuses.count(429) == 50


def test_a_limit_is_one_limit_for_eight_processes_whatever_their_clocks_say(
    eight_processes: tuple[GatewayProcess, GatewayProcess],
) -> None:
    def ask(number: int) -> tuple[int, httpx.Response]:
        # a connection of its own, so that the kernel deals them out among the workers
        which = number % 2
        answer = httpx.post(
            eight_processes[which].url + CHAT,
            json=chat("hi"),
            headers={"Authorization": f"Bearer {key_of('limited')}"},
            timeout=30,
            verify=False,
        )
        return which, answer

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(ask, range(OFFERED)))
    accepted = [(which, answer) for which, answer in found if answer.status_code == 200]
    refused = [answer for _, answer in found if answer.status_code != 200]

    assert len(accepted) == LIMIT
    assert {which for which, _ in accepted} == {0, 1}
    left = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for _, answer in accepted)
    assert left == list(range(LIMIT))
    assert {answer.headers["x-ratelimit-limit-requests"] for _, answer in accepted} == {str(LIMIT)}
    assert {answer.status_code for answer in refused} == {429}
    assert all(1 <= retry_after_s(answer) <= 61 for answer in refused)
    assert not any("x-forebay-limits" in answer.headers for _, answer in found)
    # another tenant is not the poorer for it
    for gateway in eight_processes:
        answer = httpx.post(
            gateway.url + CHAT,
            json=chat("hi"),
            headers={"Authorization": f"Bearer {key_of('other')}"},
            timeout=30,
            verify=False,
        )
        assert answer.status_code == 200


def test_a_place_falls_free_however_a_request_ends(stage: TenantsStage) -> None:
    """Aborted by its client, refused for its body, answered by an error: then a call is let in."""
    servers = stage.servers
    servers.say(held, answers(200, whole()))
    with stage.holding("single"):
        busy = stage.post("single", chat("hi"))
        assert (busy.status_code, error_of(busy)["code"]) == (429, "concurrency_limit_exceeded")
        retry_after_s(busy)

    def let_in() -> bool:
        return stage.post("single", chat("hi")).status_code == 200

    eventually(let_in, 5)
    for spoiled in (chat("hi", max_tokens="x"), {"model": "m"}, chat("hi", "nope"), [1]):
        assert 400 <= stage.post("single", spoiled).status_code < 500
        assert let_in()
    servers.say(answers(500, {"error": {"message": "broken"}}))
    assert stage.post("single", chat("hi")).status_code >= 500
    servers.say(answers(200, whole()))
    eventually(let_in, 20, every_s=0.2)  # a server that has failed is left alone for a moment


def test_who_is_refused_has_spent_nothing(stage: TenantsStage) -> None:
    stage.servers.say(held, answers(200, whole()))
    with stage.holding("single"):
        for _ in range(5):
            assert stage.post("single", chat("hi")).status_code == 429
    stage.servers.say(answers(200, whole()))
    left = []

    def let_in() -> bool:
        answer = stage.post("single", chat("hi"))
        if answer.status_code == 200:
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        return len(left) == 2

    eventually(let_in, 5)
    assert left[0] - left[1] == 1
    used = 1000 - left[0]
    refused = stage.gateway.metrics().total(
        "forebay_requests_total", tenant="single", outcome="limited"
    )
    let_in_so_far = stage.gateway.metrics().total("forebay_requests_total", tenant="single")
    assert refused >= 5
    assert used <= let_in_so_far - refused


def test_a_tenants_limit_is_a_429_that_says_which_and_when(stage: TenantsStage) -> None:
    stage.servers.say(answers(200, whole()))
    answered = [stage.post("seldom", chat("hi")) for _ in range(4)]
    assert [answer.status_code for answer in answered] == [200, 200, 200, 429]
    assert retry_after_s(answered[-1]) <= 61
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answered]
    assert left == ["2", "1", "0", "0"]
    assert all(answer.headers["x-ratelimit-reset-requests"] for answer in answered)
    # a stream is told the same, and begins not at all
    streamed = stage.post("seldom", chat("hi", stream=True))
    assert streamed.status_code == 429
    retry_after_s(streamed)


def test_the_larger_cap_is_reserved(stage: TenantsStage) -> None:
    """`max_completion_tokens` is the cap where both are sent, in what is reserved too."""
    stage.servers.say(answers(200, whole()))
    refused = stage.post("terse", chat("hi", max_tokens=1, max_completion_tokens=500))
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "request_exceeds_limit"
    assert stage.servers.asked == 0
    fits = stage.post("terse", chat("hi", max_completion_tokens=5))
    assert fits.status_code == 200
    assert fits.headers["x-ratelimit-limit-tokens"] == "100"


def test_the_completion_cap_is_kept(stage: TenantsStage) -> None:
    for caps in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 50}):
        answer = stage.post("acme", chat("hi", "tiny", ignore_eos=True, **caps))
        assert answer.json()["usage"]["completion_tokens"] == 5
        assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_our_capacity_is_a_503_that_says_when(stage: TenantsStage) -> None:
    """Every replica down; a promise that cannot be kept; and queues that are full."""
    down = stage.post("acme", chat("hi", "gone"))
    assert down.status_code == 503
    retry_after_s(down)
    with stage.busy():
        late = stage.post("hasty", chat("hi"))
    assert (late.status_code, error_of(late)["code"]) == (503, "slo_unattainable")
    retry_after_s(late)
    # late all by itself is no overload
    stage.servers.say(answers(200, whole()))
    assert stage.post("hasty", chat("hi")).status_code == 200
    long = chat("hi", "tiny", max_tokens=8000, ignore_eos=True, stream=True)
    with ExitStack() as running_and_waiting:
        for _ in range(2):
            running_and_waiting.enter_context(sent(stage.gateway.port, key_of("acme"), CHAT, long))

        def full() -> bool:
            answer = stage.post("acme", chat("hi", "tiny", max_tokens=1))
            return answer.status_code == 503 and retry_after_s(answer) >= 1

        eventually(full, 5)
    stage.gateway.until_idle(10)


def test_a_budget_is_that_of_the_model_that_really_runs(stage: TenantsStage) -> None:
    """`fallen` costs nothing, and has fallen back to `m`, which does."""
    stage.servers.say(answers(200, whole()))
    asked = chat("hi", "fallen", max_tokens=OUTPUT_TOKENS)
    answered = stage.post("poor", asked)
    assert (answered.status_code, answered.json()["model"]) == (200, "m")
    refused = stage.post("poor", asked)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "budget_exceeded")
    assert retry_after_s(refused) <= 86_400
    assert stage.servers.asked == 1
    # what fits no budget of any day is told so, and not to come again
    never = stage.post("poor", chat("hi", "fallen", max_tokens=100_000))
    assert (never.status_code, error_of(never)["code"]) == (429, "request_exceeds_limit")
    assert "retry-after" not in never.headers


def test_a_stream_that_is_left_has_one_row_of_what_was_generated(stage: TenantsStage) -> None:
    stage.gateway.until_idle(10)
    before = stage.gateway.metrics()
    body = chat("hello", "tiny", stream=True, max_tokens=6000, ignore_eos=True)
    with sent(stage.gateway.port, key_of("acme"), CHAT, body) as connection:
        received = b""
        while received.count(b"data: ") < 20:
            received += connection.recv(1 << 16)
    head = received.split(b"\r\n\r\n")[0].decode().lower()
    [request_id] = [
        line.partition(":")[2].strip()
        for line in head.split("\r\n")
        if line.startswith("x-request-id:")
    ]
    [row] = stage.rows_of(request_id)
    stage.gateway.until_idle(10)
    metrics = stage.gateway.metrics()

    def counted(name: str) -> float:
        return metrics.total(name, tenant="acme", model="tiny") - before.total(
            name, tenant="acme", model="tiny"
        )

    assert row["outcome"] == "cancelled"
    assert 0 < row["output_tokens"] < 6000
    assert row["output_tokens"] == counted("forebay_generated_tokens_total")
    assert row["prompt_tokens"] == counted("forebay_prompt_tokens_total") > 0


def test_a_failover_is_paid_for_once(stage: TenantsStage) -> None:
    stage.servers.say(breaks_after(3, SENTENCE), streams(SENTENCE, cached=0))
    answer = stage.post("acme", chat("hi", stream=True, stream_options={"include_usage": True}))
    assert answer.text.count("[DONE]") == 1
    [row] = stage.rows(answer)
    assert (row["prompt_tokens"], row["output_tokens"]) == (PROMPT_TOKENS, 6)
    assert row["outcome"] == "success"
    assert row["cost_nusd"] == PROMPT_TOKENS * 1000 + 6 * 2000


def test_a_row_has_what_the_answer_says_and_an_explicit_zero_stays_one(
    stage: TenantsStage,
) -> None:
    stage.servers.say(answers(200, whole(usage=usage(PROMPT_TOKENS, 0, 0))), answers(200, whole()))
    nothing = stage.post("acme", chat("hi"))
    assert nothing.json()["usage"]["completion_tokens"] == 0
    [row] = stage.rows(nothing)
    assert (row["output_tokens"], row["cost_nusd"]) == (0, PROMPT_TOKENS * 1000)
    usual = stage.post("acme", chat("hi"))
    [row] = stage.rows(usual)
    assert row["cached_device_tokens"] == CACHED_TOKENS
    uncached = PROMPT_TOKENS - CACHED_TOKENS
    assert row["cost_nusd"] == uncached * 1000 + CACHED_TOKENS * 500 + OUTPUT_TOKENS * 2000
    assert (row["tenant"], row["model"], row["status"]) == ("acme", "m", 200)


def test_a_request_id_that_comes_twice_is_two_requests(stage: TenantsStage) -> None:
    """A client chooses it, and pays for what it has had done."""
    stage.servers.say(answers(200, whole()))
    for _ in range(2):
        answer = stage.post("acme", chat("hi"), **{"x-request-id": "chosen-by-a-client"})
        assert answer.headers["x-request-id"] == "chosen-by-a-client"
    rows = stage.rows_of("chosen-by-a-client", at_least=2)
    assert len({row["id"] for row in rows}) == len(rows) == 2


def test_no_key_is_in_anything_that_is_new(stage: TenantsStage) -> None:
    """Keys made at run time, used, wrong, revoked: none is in what the operator, a tenant or the
    log can read afterwards, and one is shown once."""
    stage.servers.say(answers(200, whole()))
    made = stage.operator("POST", "/keys", {"tenant": "acme", "name": "made by a test"})
    assert made.status_code in (200, 201), made.text
    issued = made.json()
    plain, key_id = issued["key"], issued["id"]
    headers = {"Authorization": f"Bearer {plain}"}
    with httpx.Client(base_url=stage.gateway.url, verify=False, timeout=30) as http:

        def ask() -> httpx.Response:
            return http.post(CHAT, json=chat("hi", user=plain), headers=headers)

        eventually(lambda: ask().status_code == 200, 2)
        shown = [http.get("/v1/usage", headers=headers).text]
        assert stage.operator("DELETE", f"/keys/{key_id}").status_code in (200, 204)
        eventually(lambda: ask().status_code == 401, 2)
        refused = ask()
    shown += [refused.text, str(refused.headers), stage.post("seldom", chat(plain)).text]
    for path in ("/keys", f"/keys/{key_id}", "/tenants", "/audit", "/usage"):
        answer = stage.operator("GET", path)
        assert answer.status_code == 200, (path, answer.text)
        shown.append(answer.text)
    for kind in ("csv", "jsonl"):
        shown.append(stage.operator("GET", f"/ledger?format={kind}").text)
        assert key_id in shown[-1]
    shown += [stage.gateway.metrics().text, stage.gateway.output]
    assert any("made by a test" in text for text in shown)
    for secret in (plain, OPERATOR_KEY, *(key_of(tenant) for tenant in ("acme", "seldom"))):
        assert not any(secret in text for text in shown)


def test_what_rings_about_promises_and_accounts_is_measured(stage: TenantsStage) -> None:
    """The alerts' series are on a real gateway's page, once somebody was promised something."""
    stage.post("hasty", chat("hi"))
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    asked = {
        name
        for group in groups
        if group["name"] != "forebay"
        for rule in group["rules"]
        for name in re.findall(r"\bforebay_\w+", rule["expr"])
    }
    told = set(re.findall(r"^# TYPE (\w+) ", stage.gateway.metrics().text, re.M))
    assert len(asked) >= 8
    assert asked <= told
