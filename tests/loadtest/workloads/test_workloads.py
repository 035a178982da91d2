"""Every workload: what its parameters say is what is sent, and shared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import pytest

from loadtest.bench.workloads import STANDARD
from loadtest.plan import Load, Session, TenantPlan
from loadtest.trace import Trace, TraceRequest
from loadtest.traces.chaining import trace_of
from loadtest.traces.description import describe
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.arrivals import Closed, Open
from loadtest.workloads.building import build_load
from loadtest.workloads.registry import WORKLOADS, make_workload, parameters_of, parse_settings
from loadtest.workloads.replay import load_of
from loadtest.workloads.zipf import zipf_shares
from policies.slo import Slo

_QUICK: Mapping[str, Mapping[str, object]] = {
    "trace": {"length": 1 / 32, "longest_tokens": 512},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text(
        '{"at_s": 3, "prompt": "first", "output_tokens": 4}\n'
        '{"at_s": 5, "prompt": "second", "output_tokens": 5, "tenant": "b"}\n'
    )
    return path


def _load(name: str, seed: int = 0, requests: int | None = 20, **parameters: object) -> Load:
    workload = make_workload(name, {**_QUICK.get(name, {}), **parameters})
    return build_load(workload, requests=requests, seed=seed)


def _hit_rate(load: Load) -> float:
    rate = describe(trace_of(load, 16)).ideal_hit_rate
    assert rate is not None
    return rate


def _beginnings(load: Load) -> set[str]:
    """What no two runs may have in common."""
    turns = [turn for session in load.sessions for turn in session.turns]
    return {str(turn.messages or (turn.tokens and turn.tokens[:16])) for turn in turns}


@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {"chats"}))
def test_the_seed_makes_the_prompts(name: str) -> None:
    one, again, other = (_load(name, seed) for seed in (1, 1, 2))

    assert one == again
    assert 0 < one.requests <= 25
    assert not _beginnings(one) & _beginnings(other)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_and_parameter_says_what_it_is(name: str) -> None:
    assert WORKLOADS[name].help
    assert "\n" not in WORKLOADS[name].help
    assert all(parameter.description for parameter in parameters_of(name))


@pytest.mark.parametrize("name", STANDARD)
def test_the_standard_workloads_are_those_of_the_bench(name: str) -> None:
    load = build_load(make_workload(name), seed=7)

    turns = [turn for session in load.sessions for turn in session.turns]
    sends = STANDARD[name].sends(7, DEFAULT_VOCABULARY)
    assert [(turn.label, tuple(turn.tokens or ())) for turn in turns] == sends
    assert load.concurrency == STANDARD[name].concurrency


def test_w4_asks_again_when_it_has_been_answered() -> None:
    first = build_load(make_workload("W4")).sessions[0]

    assert [turn.label for turn in first.turns] == ["cold", "hit"]


def test_shared_prompts_are_shared_as_said() -> None:
    load = _load("shared-prompts", requests=200, groups=4, prefix_tokens=160, own_tokens=48)

    # of 13 blocks 10 are the prefix, which each of the groups sends once for the first time
    assert _hit_rate(load) == pytest.approx(10 * 196 / (13 * 200))
    labels = Counter(turn.label for session in load.sessions for turn in session.turns)
    assert labels == {"first": 4, "again": 196}


def test_popular_prompts_come_more_often() -> None:
    load = _load("shared-prompts", requests=1500, groups=3, prefix_tokens=1, own_tokens=1, zipf=1)

    counts = Counter(
        session.turns[0].tokens[0] for session in load.sessions if session.turns[0].tokens
    )
    drawn = [count / 1500 for _, count in counts.most_common()]
    assert drawn == pytest.approx(zipf_shares(3, 1.0), abs=0.05)


def test_documents_are_asked_in_turn() -> None:
    rag = make_workload("rag", {"documents": 3, "questions": 4, "document_tokens": 64})
    load = build_load(rag)

    assert load.requests == 12
    labels = [session.turns[0].label for session in load.sessions]
    assert labels == ["first"] * 3 + ["again"] * 9
    # 2 blocks of instructions, 4 of the document, 2 of the question; all but the first request
    # find the instructions, all but three the document
    assert _hit_rate(load) == pytest.approx((11 * 2 + 9 * 4) / (12 * 8))


def test_documents_may_be_drawn() -> None:
    load = _load("rag", requests=50, documents=50, document_tokens=16, zipf=2.0)

    assert Counter(session.turns[0].label for session in load.sessions)["again"] > 25


def test_unique_prompts_share_nothing() -> None:
    assert _hit_rate(_load("unique", prompt_tokens=64)) == 0.0
    assert _hit_rate(_load("mixed-lengths")) == 0.0


def test_long_requests_are_as_rare_as_said() -> None:
    load = _load("mixed-lengths", requests=1000, long_share=0.2, long_prompt_tokens=65)

    long = [session for session in load.sessions if session.turns[0].label == "long"]
    assert len(long) == pytest.approx(200, abs=50)
    assert {session.turns[0].output_tokens for session in long} == {200}


@pytest.mark.parametrize("name", ["shared-prompts", "rag", "unique", "mixed-lengths"])
def test_prompts_may_be_chats(name: str) -> None:
    load = _load(name, api="chat", exact=False)

    for session in load.sessions:
        (turn,) = session.turns
        assert turn.tokens is None
        assert not turn.exact
        assert turn.messages[-1]["role"] == "user"
    assert [message["role"] for message in load.sessions[0].turns[0].messages][:-1] == (
        ["system"] if name in ("shared-prompts", "rag") else []
    )


def test_a_chat_is_its_system_prompt_and_questions() -> None:
    load = _load("multi-turn", requests=9, turns=3, system_words=20, user_words=10, think_s=2)

    assert (len(load.sessions), load.requests) == (3, 9)
    roles = [[m["role"] for m in turn.messages] for turn in load.sessions[0].turns]
    assert roles == [["system", "user"], ["user"], ["user"]]
    assert [turn.think_s for turn in load.sessions[0].turns] == [0.0, 2.0, 2.0]
    systems = {session.turns[0].messages[0]["content"] for session in load.sessions}
    questions = {
        turn.messages[-1]["content"] for session in load.sessions for turn in session.turns
    }
    assert (len(systems), len(questions)) == (1, 9)


def test_think_times_may_vary() -> None:
    load = _load("multi-turn", requests=400, turns=2, think_s=2, think_cv=1)

    times = [session.turns[1].think_s for session in load.sessions]
    assert sum(times) / len(times) == pytest.approx(2.0, rel=0.3)
    assert len(set(times)) == len(times)


def test_an_agent_is_told_of_its_tools_in_the_system_prompt() -> None:
    load = _load("agent", requests=6, steps=3, tools=2)

    first, second, third = load.sessions[0].turns
    assert first.messages[0]["content"].count('"type":"function"') == 2
    assert second.messages[0]["content"].startswith("Result: ")
    assert first.fields == second.fields == {}
    assert [first.think_s, second.think_s, third.think_s] == [0.0, 0.5, 0.5]
    assert load.sessions[1].turns[0].messages[0] == first.messages[0]


def test_an_agent_may_be_told_by_a_field() -> None:
    load = _load("agent", requests=3, steps=3, tools=2, tools_in="field")

    for turn in load.sessions[0].turns:
        assert len(turn.fields["tools"]) == 2
        assert turn.fields["tool_choice"] == "none"
    assert "function" not in load.sessions[0].turns[0].messages[0]["content"]


def test_histories_are_what_is_shared() -> None:
    multi_turn = _load("multi-turn", requests=2, turns=2, system_words=400, user_words=15)
    agent = _load("agent", requests=2, steps=2, system_words=400, task_words=15)

    # of the second request all is known but what was asked last
    assert _hit_rate(multi_turn) > 0.4
    assert _hit_rate(agent) > 0.4


def test_a_trace_is_replayed_at_its_times() -> None:
    load = build_load(make_workload("trace", {"length": "0.03125", "rate": "10"}), seconds=20)

    assert load.concurrency is None
    assert load.requests == pytest.approx(200, rel=0.25)
    assert max(session.start_s for session in load.sessions) < 20
    whole = build_load(make_workload("trace", {"length": 1 / 32}))
    assert _hit_rate(whole) == pytest.approx(6274 / 29_459)


def test_what_does_not_fit_is_said() -> None:
    load = build_load(make_workload("trace", {"length": 1 / 32, "longest_tokens": 2000}))

    assert load.requests == 1068 - 38
    assert ", 38 requests dropped as too long;" in load.title


def test_recorded_chats_are_sent_as_they_are(chats: Path) -> None:
    load = build_load(
        make_workload("chats", {"file": str(chats), "speed": 2, "exact": "no"}), seed=9
    )

    assert [session.start_s for session in load.sessions] == [0.0, 1.0]
    assert [session.turns[0].messages[0]["content"] for session in load.sessions] == [
        "first",
        "second",
    ]
    assert not load.sessions[0].turns[0].exact
    assert [tenant.name for tenant in load.tenants] == ["loadtest", "b"]


def test_recorded_chats_say_that_they_are_the_same_in_every_run(chats: Path) -> None:
    workload = make_workload("chats", {"file": str(chats)})

    assert not workload.ever_new
    assert "the same texts in every run" in build_load(workload).title
    assert make_workload("unique").ever_new


@pytest.mark.parametrize("seconds", [0.0, float("inf"), float("nan")])
def test_a_load_ends(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds: must be more than 0, and not without end"):
        build_load(make_workload("unique"), arrivals=Open(1.0), seconds=seconds)


def test_too_few_blocks_for_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="request 0 has 33 tokens in only 2 blocks of 16"):
        load_of(Trace("short", 16, [TraceRequest(0, 33, 1, (0, 1))]))


def test_prompts_keep_to_the_vocabulary() -> None:
    load = build_load(make_workload("unique"), requests=3, vocabulary=Vocabulary(3, 11))

    assert {t for s in load.sessions for t in s.turns[0].tokens or ()} == set(range(3, 11))


def test_an_open_loop_has_as_many_as_come_in_time() -> None:
    load = build_load(make_workload("unique"), arrivals=Open(5.0, 0.0), seconds=4.0)

    assert [session.start_s for session in load.sessions] == [n / 5 for n in range(20)]
    assert load.concurrency is None
    both = build_load(make_workload("unique"), arrivals=Open(5.0), seconds=100.0, requests=7)
    assert both.requests == 7


def test_sessions_are_whole() -> None:
    assert build_load(make_workload("multi-turn", {"turns": 4}), requests=6).requests == 8


def test_the_usual_is_what_is_not_said() -> None:
    load = build_load(make_workload("unique"))

    assert (load.requests, load.concurrency) == (100, 8)
    assert load.title == (
        "unique (prompt_tokens=512, output_tokens=32, api=completions, exact=True); "
        "8 at a time; seed 0"
    )


def test_all_of_it_is_for_the_tenant_that_is_given() -> None:
    tenant = TenantPlan("acme", "ACME_KEY", Slo(ttft_s=0.5))

    load = build_load(make_workload("unique"), requests=2, tenant=tenant)

    assert load.tenants == (tenant,)
    assert {session.tenant for session in load.sessions} == {"acme"}


def test_limits_that_do_not_fit_are_refused() -> None:
    workload = make_workload("unique")
    with pytest.raises(ValueError, match="seconds: a closed loop ends after so many requests"):
        build_load(workload, arrivals=Closed(2), seconds=3.0)
    with pytest.raises(ValueError, match="requests: must be more than 0"):
        build_load(workload, requests=0)


@pytest.mark.parametrize(
    ("name", "parameters", "complaint"),
    [
        ("W9", {}, r"no workload W9; there are W1, W2, W3, W4, shared-prompts, "),
        ("W1", {"x": "1"}, r"x: unknown parameter; W1 has no parameters"),
        ("unique", {"promt": 1}, r"promt: unknown parameter; unique has prompt_tokens, output"),
        ("unique", {"prompt_tokens": "0"}, r"^prompt_tokens: must be at least 1$"),
        ("unique", {"prompt_tokens": "many"}, r"^prompt_tokens: input should be a valid integer"),
        ("unique", {"api": "soap"}, r"^api: must be one of 'completions', 'chat'$"),
        ("mixed-lengths", {"long_share": 2}, r"^long_share: must be at most 1"),
        ("trace", {"speed": 2, "rate": 1}, r"^rate and speed cannot both be given$"),
        ("trace", {"speed": 0}, r"^speed: must be more than 0"),
        ("chats", {}, r"^file: is required$"),
    ],
)
def test_wrong_parameters_are_named(
    name: str, parameters: Mapping[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        make_workload(name, parameters)


def test_a_rate_cannot_be_made_of_one_moment(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"at_s": 0, "prompt_tokens": 1, "output_tokens": 1}')

    with pytest.raises(ValueError, match="all requests came at once"):
        build_load(make_workload("trace", {"file": str(file), "rate": 1}))


def test_settings_are_pairs() -> None:
    assert parse_settings(["groups=4", " file = a=b "]) == {"groups": "4", "file": "a=b"}
    for wrong in ("groups", "=4"):
        with pytest.raises(ValueError, match="must be name=value"):
            parse_settings([wrong])
    with pytest.raises(ValueError, match="groups: is given twice"):
        parse_settings(["groups=1", "groups=2"])


def test_workloads_go_on_for_as_long_as_is_asked() -> None:
    sessions = make_workload("unique", {"prompt_tokens": 1}).sessions(0, DEFAULT_VOCABULARY)

    taken: list[Session] = list(islice(sessions, 1000))
    assert len(taken) == 1000
