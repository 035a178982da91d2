"""Whether servers are up, and how busy they say they are."""

from __future__ import annotations

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from gateway.dispatch.member import Condition
from gateway.remote.reported_load import ReportedLoad, foreign_load, parse_load
from policies.routing import Standing
from tests.gateway.remote.remote_stage import KEY, chat, staged
from tests.gateway.remote.upstream import Received, Upstream, answers, breaks_after, whole
from tests.gateway.stage import eventually

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="served"} 3.0
vllm:num_requests_running{engine="1",model_name="served"} 2.0
vllm:num_requests_waiting{engine="0",model_name="served"} 4.0
vllm:num_requests_waiting_by_reason{engine="0"} 99
process_start_time_seconds 1.7e9
"""


async def test_a_server_without_the_model_is_down_and_says_which():
    async with staged(Upstream(models=["other"])) as stage:
        health = stage.replicas[0].health()
        assert health.condition is Condition.DOWN
        assert "served" in health.reason
        answer = await stage.post(chat())
        assert answer.status == 503


async def test_a_llama_cpp_server_runs_its_one_model_under_any_name():
    async with staged(Upstream(models=["a.gguf"]), settings={"engine": "llama.cpp"}) as stage:
        assert stage.replicas[0].health().condition is Condition.SERVING


@pytest.mark.parametrize(("status", "words"), [(401, "key"), (500, "500"), (404, "404")])
async def test_a_server_that_answers_otherwise_is_down(status, words):
    async with staged(Upstream(models_status=status)) as stage:
        assert stage.replicas[0].health().condition is Condition.DOWN
        assert words in stage.replicas[0].health().reason


async def test_a_server_that_goes_and_comes_back_is_noticed_and_taken_for_cold():
    upstream = Upstream([answers(200, whole())])
    async with staged(Upstream(), upstream) as stage:
        changes, replica = stage.changes, stage.replicas[1]
        upstream.models_status = 500
        await eventually(lambda: replica.health().condition is Condition.DOWN)
        upstream.models_status = 200
        await eventually(lambda: replica.health().condition is Condition.SERVING)
        assert stage.changes == changes + 2
        assert stage.restarts == 1


async def test_a_loss_is_followed_by_a_look_and_one_line_without_secrets():
    upstream = Upstream([breaks_after(1, "a b"), breaks_after(1, "a b"), answers(500, {})])
    with capture_logs() as logs:
        async with staged(upstream, routing={"moves": 1, "recovery_s": 0.1}) as stage:
            await stage.post(chat(stream=True))
    lines = [line for line in logs if line["event"] == "remote replica lost a request"]
    assert len(lines) == 2
    assert {line["replica"] for line in lines} == {stage.replicas[0].name}
    assert {line["kind"] for line in lines} <= {"connection lost", "answer ended early"}
    assert KEY not in str(logs)
    assert "http://" not in str(logs)


async def test_what_others_put_on_a_server_counts():
    async with staged(Upstream(metrics=PAGE)) as stage:
        [member] = stage.router.members
        await eventually(lambda: member.load.standing().running > 0)
        standing = member.load.standing()
        assert (standing.waiting, standing.running) == (4, 5)


@pytest.mark.parametrize("page", [None, "nothing that is known"], ids=["gone", "another"])
async def test_what_a_server_says_no_more_counts_no_more(page, monkeypatch):
    monkeypatch.setattr("gateway.remote.probes._MOST_UNREAD", 2)
    upstream = Upstream(metrics=PAGE)
    async with staged(upstream) as stage:
        [member] = stage.router.members
        await eventually(lambda: member.load.standing().waiting == 4)
        upstream.metrics = page
        await eventually(lambda: member.load.standing() == Standing(max_running=8))


async def test_a_page_that_is_missed_once_changes_nothing():
    upstream = Upstream(metrics=PAGE)
    async with staged(upstream) as stage:
        [member] = stage.router.members
        await eventually(lambda: member.load.standing().waiting == 4)
        loads = []
        member.load.listen(lambda: loads.append(member.load.standing().waiting))
        upstream.metrics = ""
        seen = len(upstream.probes)
        await eventually(lambda: len(upstream.probes) > seen + 1)
        upstream.metrics = PAGE
        await eventually(lambda: len(upstream.probes) > seen + 3)
        assert loads == []


async def test_a_server_that_comes_back_with_a_page_is_read():
    upstream = Upstream()
    async with staged(upstream) as stage:
        [member] = stage.router.members
        upstream.models_status, upstream.metrics = 500, PAGE
        await eventually(lambda: stage.replicas[0].health().condition is Condition.DOWN)
        upstream.models_status = 200
        await eventually(lambda: member.load.standing().waiting == 4)


async def test_another_process_has_forgotten_what_the_last_one_held():
    upstream = Upstream(metrics=PAGE)
    async with staged(upstream) as stage:
        seen = len(upstream.probes)
        await eventually(lambda: len(upstream.probes) > seen + 1)
        assert stage.restarts == 0
        upstream.metrics = PAGE.replace("1.7e9", "1.8e9")
        await eventually(lambda: stage.restarts == 1)


async def test_a_silent_server_is_down_and_close_is_idempotent():
    async with staged(Upstream(silent=True)) as stage:
        assert stage.replicas[0].health().condition is Condition.DOWN
        assert "in time" in stage.replicas[0].health().reason
        await stage.replicas[0].close()
        await stage.replicas[0].close()
        assert stage.replicas[0].health().reason == "closed"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(["vllm", "sglang", "llama.cpp", "openai"]))
def test_any_page_can_be_read(noise, engine):
    page = noise + PAGE.encode() + noise
    load = parse_load(page, engine)
    assert load is None or (load.running >= 0 and load.waiting >= 0)


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "x", "1e999"])
def test_a_value_that_cannot_be_is_none(value):
    page = PAGE.replace("4.0", value)
    assert parse_load(page.encode(), "vllm") is None


def test_every_engines_names_are_known():
    sglang = b'sglang:num_running_reqs{a="b"} 1.0\nsglang:num_queue_reqs{a="b"} 2.0\n'
    assert parse_load(sglang, "sglang") == ReportedLoad(1, 2)
    llama = b"llamacpp:requests_processing 3\nllamacpp:requests_deferred 0\n"
    assert parse_load(llama, "llama.cpp") == ReportedLoad(3, 0)
    assert parse_load(PAGE.encode(), "vllm") == ReportedLoad(5, 4, 1.7e9)
    assert parse_load(PAGE.encode(), "forebay") is None


counts = st.integers(0, 50)


@settings(max_examples=60, deadline=None)
@given(counts, counts, counts, counts, counts)
def test_foreign_load_is_the_rest_and_never_negative(running, waiting, own_w, own_r, tokens):
    load = foreign_load(ReportedLoad(running, waiting), own_w, own_r, tokens)
    assert load.running >= 0
    assert load.waiting >= 0
    assert load.running + load.waiting == max(0, running + waiting - own_w - own_r)
    assert load.pending_tokens == load.waiting * tokens


async def test_probes_do_not_inflate_what_they_read():
    """A few kilobytes can become any number."""

    class Packed(Upstream):
        async def _probe(self, received: Received) -> None:
            packed = gzip.compress(b'{"data": [{"id": "served"}]}' + b" " * (1 << 20))
            await received.answer(200, packed, content_encoding="gzip")

    upstream = Packed()
    async with staged(upstream) as stage:
        health = stage.replicas[0].health()
    assert health.condition is Condition.DOWN
    assert "encoding" in health.reason
    assert {probe.headers["accept-encoding"] for probe in upstream.probes} == {"identity"}


async def test_probes_read_no_more_than_they_can_take(monkeypatch):
    monkeypatch.setattr("gateway.remote.probes._MODELS_BYTES", 1000)
    async with staged(Upstream(models=["served", "x" * 1000])) as stage:
        assert "more than a probe can take" in stage.replicas[0].health().reason
