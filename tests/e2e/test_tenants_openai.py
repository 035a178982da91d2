"""The official client's own retries: it waits for as long as it is told, and then is let in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
from openai import OpenAI

from tests.e2e.tenants_stage import TenantsStage, held, key_of, tenants_stage
from tests.gateway.remote.upstream import answers, whole

ASK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantsStage]:
    with tenants_stage(tmp_path_factory.mktemp("openai-tenants")) as stage:
        yield stage


@contextmanager
def client(stage: TenantsStage, tenant: str, retries: int) -> Iterator[OpenAI]:
    with OpenAI(
        api_key=key_of(tenant), base_url=stage.gateway.url + "/v1", max_retries=retries
    ) as made:
        yield made


def refused(stage: TenantsStage, tenant: str, outcome: str) -> float:
    return stage.gateway.metrics().total("forebay_requests_total", tenant=tenant, outcome=outcome)


def test_after_a_429_it_comes_again_when_told_and_is_let_in(stage: TenantsStage) -> None:
    stage.servers.say(held, answers(200, whole("There you are")))
    left = threading.Event()
    with stage.holding("single"), client(stage, "single", 0) as impatient:
        with pytest.raises(openai.RateLimitError) as limited:
            impatient.chat.completions.create(model="m", messages=ASK)
        assert limited.value.code == "concurrency_limit_exceeded"
        after_s = int(limited.value.response.headers["retry-after"])
    before = refused(stage, "single", "limited")
    with client(stage, "single", 2) as patient:

        def leave_once_it_was_refused() -> None:
            with stage.holding("single"):
                ready.set()
                while refused(stage, "single", "limited") == before:
                    time.sleep(0.01)
            left.set()

        stage.servers.say(held, answers(200, whole("There you are")))
        ready = threading.Event()
        holder = threading.Thread(target=leave_once_it_was_refused)
        holder.start()
        try:
            assert ready.wait(10)
            began_s = time.monotonic()
            answer = patient.chat.completions.create(model="m", messages=ASK)
        finally:
            holder.join()
    assert left.is_set()
    assert answer.choices[0].message.content == "There you are"
    assert time.monotonic() - began_s >= after_s
    assert refused(stage, "single", "limited") == before + 1


@pytest.mark.parametrize(
    ("tenant", "model", "code"),
    [("hasty", "m", "slo_unattainable"), ("acme", "gone", "engine_unavailable")],
)
def test_after_a_503_it_comes_again_when_told_and_then_says_so(
    stage: TenantsStage, tenant: str, model: str, code: str
) -> None:
    before = refused(stage, tenant, "unavailable")
    with stage.busy(), client(stage, tenant, 1) as retrying:
        began_s = time.monotonic()
        with pytest.raises(openai.InternalServerError) as unavailable:
            retrying.chat.completions.create(model=model, messages=ASK)
        took_s = time.monotonic() - began_s
    assert (unavailable.value.status_code, unavailable.value.code) == (503, code)
    assert took_s >= int(unavailable.value.response.headers["retry-after"])
    assert refused(stage, tenant, "unavailable") == before + 2


def test_a_limit_that_will_not_be_met_is_an_error_of_its_own(stage: TenantsStage) -> None:
    """No wait would help: the client is told so, and does not come again for nothing."""
    before = refused(stage, "terse", "limited")
    with client(stage, "terse", 2) as asking, pytest.raises(openai.RateLimitError) as too_large:
        asking.chat.completions.create(model="m", messages=ASK, max_completion_tokens=500)
    assert too_large.value.code == "request_exceeds_limit"
    assert refused(stage, "terse", "limited") == before + 1


def test_what_is_left_is_in_the_headers_of_answers_and_streams(stage: TenantsStage) -> None:
    stage.servers.say(answers(200, whole()))
    with client(stage, "single", 0) as asking:
        raw = asking.chat.completions.with_raw_response.create(model="m", messages=ASK)
        assert raw.headers["x-ratelimit-limit-requests"] == "1000"
        left = int(raw.headers["x-ratelimit-remaining-requests"])
        assert left < 1000
        assert raw.parse().choices[0].message.content == "Hello"
    stage.servers.say(held)
    with (
        stage.client("single") as other,
        other.http.stream(
            "POST",
            "/v1/chat/completions",
            json={"model": "m", "messages": ASK, "stream": True},
            headers=other.headers,
        ) as streamed,
    ):
        assert streamed.status_code == 200
        assert int(streamed.headers["x-ratelimit-remaining-requests"]) == left - 1
