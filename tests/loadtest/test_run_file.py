"""Runs that are written and read back."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadtest.plan import TenantPlan
from loadtest.record import ClientHealth, Outcome, Record, Run, Sample, Tiers
from loadtest.run_file import read_run, write_run
from loadtest.summary import summarize
from policies.service_class import ServiceClass
from policies.slo import Slo
from tests.loadtest.some_records import ANY_RECORD, answer, failure, run_of

RUN = run_of(
    [
        answer(100, 10, cached_tokens=64, tiers=Tiers(32, 16, 16), gaps_s=(0.01, 0.02)),
        answer(250.125, 10, index=1, tenant="acme", label="cold", replica="r1", price_nusd=12),
        failure(Outcome.LIMITED, tenant="acme", reason="429: slower"),
    ],
    (
        TenantPlan(),
        TenantPlan(
            "acme", "ACME_KEY", Slo(0.2, 0.1, 0.9, "queue", None, 3.0), ServiceClass.BATCH, 2.0
        ),
    ),
    settings={"seed": "7"},
    machine=("CPU: some, 2 cores",),
    timeline=(Sample(0.0, 1, 0), Sample(1.0, 2.5, 3, redis_bytes=1e9)),
    client=ClientHealth(0.001, 0.002, 0.003, 0.004, 0.5, 12, ("too slow",)),
    usd_per_hour=2.0,
    notes=("warm-up: 5 s",),
)


def _without_records(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__slots__ if name != "records"}


def _document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    return found


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_run(path, RUN)
    found = read_run(path)

    assert _without_records(found) == _without_records(RUN)
    assert list(found.records) == RUN.records
    assert path.read_bytes().startswith(b"\x1f\x8b" if name.endswith(".gz") else b"{")
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_read_can_be_written_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, RUN)
    write_run(path, read_run(path))

    assert _without_records(read_run(path)) == _without_records(RUN)
    assert list(read_run(path).records) == RUN.records


def test_the_figures_are_in_the_file_for_other_readers(tmp_path: Path) -> None:
    write_run(tmp_path / "run.json", RUN)
    whole = _document(tmp_path / "run.json")["summary"]["whole"]
    expected = summarize(RUN).whole

    assert whole["requests"] == 3
    assert whole["outcomes"] == {"ok": 2, "limited": 1}
    assert whole["goodput_rps"] == expected.goodput_rps
    assert expected.latencies.ttft_ms is not None
    assert whole["latencies"]["ttft_ms"]["p95"] == expected.latencies.ttft_ms.p95


def test_a_run_of_nothing_is_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, run_of([]))

    assert list(read_run(path).records) == []
    assert read_run(path).timeline == ()
    assert read_run(path).client is None


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ANY_RECORD, max_size=6))
def test_any_records_are_read_as_they_were_to_the_nanosecond(
    tmp_path: Path, records: list[Record]
) -> None:
    path = tmp_path / "run.json"
    write_run(path, run_of(records))
    found = list(read_run(path).records)

    assert len(found) == len(records)
    for one, expected in zip(found, records, strict=True):
        for name in Record.__slots__:
            assert getattr(one, name) == pytest.approx(getattr(expected, name), abs=1e-9), name


def test_no_key_gets_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", "sk-acme-0123456789")
    path = tmp_path / "run.json"
    leaky = "--key sk-own-9876543210 with sk-acme-0123456789"
    write_run(
        path,
        run_of(
            [failure(Outcome.REFUSED, reason=f"401: {leaky}"), answer(1)],
            (TenantPlan("acme", "ACME_KEY"),),
            command=leaky,
            target=leaky,
            settings={"arguments": leaky},
            notes=(leaky,),
            client=ClientHealth(0, 0, 0, 0, 0, 0, (leaky,)),
        ),
        keys=["", "sk-own", "sk-own-9876543210"],
    )

    assert "sk-" not in path.read_text()
    assert read_run(path).command == "--key [key] with [key]"
    assert read_run(path).records[0].reason == "401: --key [key] with [key]"


def test_reasons_that_differ_by_a_key_only_become_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    records = [failure(reason=f"401: sk-{each} is no key") for each in ("first", "second")]
    write_run(path, run_of([*records, failure(), answer(1)]), keys=["sk-first", "sk-second"])

    assert summarize(read_run(path)).reasons == (("401: [key] is no key", 2),)
    assert [each.reason for each in read_run(path).records][2:] == [None, None]


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_run(path, RUN)

    def full(self: Path, data: bytes) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space left"):
        write_run(path, run_of([]))
    assert len(read_run(path).records) == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no run of a load test"),
        (b"\xff\xfe", "no run of a load test"),
        (b'{"format": "forebay loadtest run", "version": 1', "no run of a load test"),
        (b"[]", "no run of a load test"),
        (b'{"format": "a shopping list", "version": 1}', "says that it is a 'a shopping list'"),
        (b'{"format": "forebay loadtest run", "version": 2}', "has version 2 .* reads version 1"),
        (b'{"format": "forebay loadtest run", "version": 1}', "missing required field `run`"),
        (gzip.compress(b"{}")[:-4], "cannot be decompressed"),
        (b"\x1f\x8b nothing", "cannot be decompressed"),
    ],
)
def test_what_is_no_run_is_refused_with_its_path(tmp_path: Path, data: bytes, why: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(data)

    with pytest.raises(ValueError, match=rf"run\.json: .*({why})") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "changes", "why"),
    [
        ("records", {"due_s": []}, "due_s has 0 values for 3 records"),
        ("records", {"due_s": ["now"]}, "Expected `float`, got `str`"),
        ("records", {"index": [1 << 63] * 3}, "too large|too big|out of bounds"),
        ("records", {"outcome": {"values": ["fine"], "places": [0]}}, "enum value 'fine'"),
        ("records", {"label": {"values": [""], "places": [0, 1, 0]}}, "label has places without"),
        ("records", {"label": {"values": [""], "places": [0, -1, 0]}}, "label has places without"),
        (
            "records",
            {"label": {"values": ["", ""], "places": [0, 0, 1]}},
            "label has a value twice",
        ),
        ("records", {"gaps": {"seconds": [], "counts": [1, 0, 0]}}, "more or fewer gaps"),
        ("records", {"gaps": {"seconds": [], "counts": [1, -1, 0]}}, "more or fewer gaps"),
        ("run", {"kind": "dreamt"}, "'dreamt'"),
        ("run", {"timeline": {"at_s": [1.0]}}, "the timeline's lists"),
        ("run", {"client": {"lag_p99_s": 0.1}}, "Expected `float`, got `null`"),
    ],
)
def test_a_damaged_run_is_refused_with_what_is_wrong(
    tmp_path: Path, part: str, changes: dict[str, Any], why: str
) -> None:
    path = tmp_path / "run.json"
    write_run(path, RUN)
    document = _document(path)
    document[part] |= changes
    path.write_bytes(orjson.dumps(document))

    with pytest.raises(ValueError, match=rf"run\.json: .*({why})") as caught:
        read_run(path)
    assert "\n" not in str(caught.value)


def test_fields_that_are_not_known_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, RUN)
    document = _document(path)
    document["run"]["weather"] = "fine"
    path.write_bytes(orjson.dumps(document))

    assert _without_records(read_run(path)) == _without_records(RUN)
