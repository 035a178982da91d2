"""Plans in files: what they give, and every mistake by its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.plan import TenantPlan
from loadtest.vocabulary import DEFAULT_VOCABULARY
from loadtest.workloads import plan_file
from loadtest.workloads.plan_file import read_plan
from policies.service_class import ServiceClass
from policies.slo import Slo

_OPEN = """\
seed: 3
tenants:
  - name: quiet
    key_env: QUIET_KEY
    class: interactive
    weight: 2
    slo: {ttft_ms: 500, tpot_ms: 120, target: 0.9}
    workload: unique
    parameters: {prompt_tokens: 8}
    arrivals: {pattern: constant, rate: 2}
    seconds: 3
  - name: busy
    workload: unique
    parameters: {prompt_tokens: 8}
    arrivals: {pattern: gamma, rate: 4, cv: 3}
    requests: 5
"""
_CLOSED = """\
title: beside each other
concurrency: 4
tenants:
  - {name: a, workload: unique, requests: 4}
  - {name: b, workload: unique, requests: 2}
"""


def _written(directory: Path, text: str) -> Path:
    path = directory / "plan.yaml"
    path.write_text(text)
    return path


def test_every_tenant_has_its_own(tmp_path: Path) -> None:
    load = read_plan(_written(tmp_path, _OPEN)).load()

    assert load.tenants == (
        TenantPlan("quiet", "QUIET_KEY", Slo(0.5, 0.12, 0.9), ServiceClass.INTERACTIVE, 2.0),
        TenantPlan("busy"),
    )
    quiet = [session for session in load.sessions if session.tenant == "quiet"]
    assert [session.start_s for session in quiet] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert load.requests == 11
    times = [session.start_s for session in load.sessions]
    assert times == sorted(times)
    prompts = {tuple(session.turns[0].tokens or ()) for session in load.sessions}
    assert len(prompts) == 11
    assert load.title.startswith("plan.yaml: quiet: unique (")
    assert load.title.endswith("; each at its rate; seed 3")


def test_seed_and_speed_can_be_others(tmp_path: Path) -> None:
    plan = read_plan(_written(tmp_path, _OPEN))

    assert plan.load() == plan.load(seed=3)
    faster = plan.load(seed=4, speed=2.0)
    quiet = [session for session in faster.sessions if session.tenant == "quiet"]
    assert len(quiet) == 12
    ours, theirs = (
        {tuple(session.turns[0].tokens or ()) for session in load.sessions}
        for load in (plan.load(), faster)
    )
    assert not ours & theirs
    with pytest.raises(ValueError, match="speed must be more than 0"):
        plan.load(speed=0)


def test_a_closed_loop_mixes_its_tenants_evenly(tmp_path: Path) -> None:
    plan = read_plan(_written(tmp_path, _CLOSED))
    load = plan.load()

    assert "".join(session.tenant for session in load.sessions) == "abaaba"
    assert load.concurrency == 4
    assert load.title == "plan.yaml: beside each other; 4 at a time; seed 0"
    with pytest.raises(ValueError, match="a closed loop has no rate"):
        plan.load(speed=2)


def test_a_recorded_trace_lies_beside_its_plan(tmp_path: Path) -> None:
    lines = [f'{{"at_s": {n}, "prompt_tokens": 9, "output_tokens": 1}}' for n in range(10)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines))
    text = "tenants: [{name: a, workload: trace, parameters: {file: mine.jsonl}, seconds: 2}]"

    load = read_plan(_written(tmp_path, text)).load(speed=2)

    assert [session.start_s for session in load.sessions] == [0.0, 0.5, 1.0, 1.5]
    assert {session.tenant for session in load.sessions} == {"a"}


def test_the_example_in_the_docstring_is_a_plan(tmp_path: Path) -> None:
    assert plan_file.__doc__ is not None
    _, example, _ = plan_file.__doc__.split("\n\n")

    load = read_plan(_written(tmp_path, example)).load()

    assert [tenant.name for tenant in load.tenants] == ["quiet", "busy"]


def _tenant(**replaced: str) -> str:
    fields = {"name": "a", "workload": "unique", "arrivals": "{pattern: poisson, rate: 1}"}
    pairs = (f"{name}: {value}" for name, value in (fields | replaced).items() if value)
    return f"tenants: [{{{', '.join(pairs)}}}]"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", ": must be a mapping of names to values"),
        ("tenants: []", ": tenants: must not be empty"),
        ("x: 1\n" + _tenant(), ": x: unknown name"),
        ("a: [", ":1:5: "),
        ("{[1]: 2}", ":1:2: a name must be text"),
        ("seed: 2024-99-99", ": has a value that YAML cannot read"),
        ("seed: 1\nseed: 2", ":2:1: seed is given twice"),
        (_tenant(workload=""), ": tenants[0].workload: is required"),
        (_tenant(workload="W9"), ": tenants[0].workload: must be one of W1, W2"),
        (_tenant(parameters="{x: 1}"), ": tenants[0].parameters: x: unknown parameter"),
        (_tenant(parameters="[]"), ": tenants[0].parameters: "),
        (_tenant(slo="{ttft_ms: 0}"), ": tenants[0].slo.ttft_ms: must be more than 0"),
        (_tenant(slo="{ttft: 1}"), ": tenants[0].slo.ttft: unknown name"),
        (_tenant(key_env="sk-not-a-variable"), ": tenants[0].key_env: must be the name of an"),
        (_tenant(arrivals=""), ": tenants[0].arrivals: is required, unless"),
        (_tenant(arrivals="{pattern: poisson}"), ": tenants[0].arrivals.rate: is required"),
        (_tenant(arrivals="{pattern: gamma, rate: 1}"), ": tenants[0].arrivals: cv is needed"),
        (_tenant(arrivals="{pattern: closed, rate: 1}"), ": tenants[0].arrivals.pattern: must"),
        (_tenant(**{"class": "urgent"}), ": tenants[0].class: must be one of 'interactive'"),
        (_tenant(requests="0"), ": tenants[0].requests: must be at least 1"),
        ("concurrency: 2\n" + _tenant(), ": tenants[0].arrivals: the plan is a closed loop"),
        (
            "concurrency: 2\n" + _tenant(arrivals="", seconds="3"),
            ": tenants[0].seconds: the plan is a closed loop",
        ),
        (_CLOSED.replace("name: b", "name: a"), ": tenants[1].name: another tenant has it"),
    ],
)
def test_every_mistake_names_its_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = _written(tmp_path, text)

    with pytest.raises(ValueError, match="plan") as raised:
        read_plan(path)

    assert str(raised.value).startswith(f"{path}{complaint}")
    assert "sk-not" not in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.yaml: cannot be read \(No such file"):
        read_plan(tmp_path / "none.yaml")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = "tenants: [{name: a, workload: x}, {name: a, workload: unique}]"

    with pytest.raises(ValueError, match="tenants") as raised:
        read_plan(_written(tmp_path, text))

    assert len(str(raised.value).splitlines()) == 3


def test_fields_and_what_they_hold_are_told_together(tmp_path: Path) -> None:
    text = (
        "tenants:\n"
        "  - {name: a, workload: uniq, patern: poisson}\n"
        "  - {name: a, workload: unique, parameters: {x: 1}, weight: 0}\n"
        "  - {name: [a], workload: [unique], parameters: 3}\n"
        "  - what is this\n"
    )
    path = _written(tmp_path, text)

    with pytest.raises(ValueError, match="tenants") as raised:
        read_plan(path)

    lines = [line.removeprefix(f"{path}: ") for line in str(raised.value).splitlines()]
    assert [line.partition(": ")[0] for line in lines] == [
        *("tenants[0].workload", "tenants[0].patern"),
        "tenants[1].weight",
        *(f"tenants[2].{name}" for name in ("name", "workload", "parameters")),
        "tenants[3]",
        *("tenants[1].parameters", "tenants[1].name"),
    ]
    assert "must not be empty" not in str(raised.value)


def test_a_seed_is_the_files_or_nobodys(tmp_path: Path) -> None:
    assert read_plan(_written(tmp_path, _OPEN)).seed == 3
    unsaid = read_plan(_written(tmp_path, _CLOSED))
    assert unsaid.seed is None
    assert unsaid.load() == unsaid.load(seed=0)


def test_other_speeds_need_runs_of_one_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan.yaml: concurrency: a closed loop has no rate"):
        read_plan(_written(tmp_path, _CLOSED)).check_speeds()
    with pytest.raises(ValueError, match=r"plan.yaml: tenants\[1\].seconds: is needed"):
        read_plan(_written(tmp_path, _OPEN)).check_speeds()
    read_plan(_written(tmp_path, _OPEN.replace("requests: 5", "seconds: 3"))).check_speeds()


def test_a_warm_up_has_so_many_requests_and_no_text_that_comes_again(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"at_s": 0, "prompt": "hello", "output_tokens": 4}\n')
    plan = read_plan(
        _written(
            tmp_path,
            "tenants:\n"
            "  - {name: a, workload: chats, parameters: {file: chats.jsonl}}\n"
            "  - {name: b, workload: agent, parameters: {steps: 2}, requests: 6,\n"
            "     arrivals: {pattern: constant, rate: 1}}\n",
        )
    )
    warm = plan.warm_up(9, 3, DEFAULT_VOCABULARY)

    assert [(session.tenant, len(session.turns)) for session in warm] == [("b", 2), ("b", 2)]
