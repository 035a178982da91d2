"""Why a prompt hit or missed, in words that say what to do."""

from __future__ import annotations

import json

import pytest

from cache.block import Tier
from cache.report import BlockRun, CacheUse, Miss
from gateway.explain import REASONS, explained, text_lines
from gateway.recent_requests import ChoiceUse, RecentRequest
from gateway.turns import Place


def recent(*choices: ChoiceUse) -> RecentRequest:
    return RecentRequest("req-1", 1_700_000_000.9, "acme", "m", "m/0", "chat", choices)


def one(*runs: BlockRun, tokens: int = 100, places: dict[int, Place] | None = None) -> ChoiceUse:
    return ChoiceUse(0, 0, tokens, CacheUse(16, runs=runs), places or {})


@pytest.mark.parametrize("miss", Miss)
def test_every_miss_has_words_of_its_own(miss: Miss) -> None:
    [run] = explained(recent(one(BlockRun(0, 1, None, miss))))["choices"][0]["runs"]
    assert run["miss"] == miss.value
    assert run["why"] == REASONS[miss].words
    assert run["tier"] is None
    assert sum(reason.words == run["why"] for reason in REASONS.values()) == 1


@pytest.mark.parametrize("miss", [Miss.EVICTED, Miss.OTHER_SALT, Miss.TIER_DOWN, Miss.DIVERGED])
def test_what_can_be_acted_on_names_the_next_step(miss: Miss) -> None:
    [run] = explained(recent(one(BlockRun(0, 1, None, miss))))["choices"][0]["runs"]
    assert run["next_step"]


def test_a_mixed_prompt() -> None:
    runs = (
        BlockRun(0, 2, Tier.DEVICE),
        BlockRun(2, 1, Tier.REDIS),
        BlockRun(3, 1, None, Miss.DIVERGED, 55),
        BlockRun(4, 2, None, Miss.AFTER_GAP),
        BlockRun(6, 1, None, Miss.LAST_TOKEN),
    )
    use = CacheUse(16, device_tokens=32, redis_tokens=16, load_s=0.00125, runs=runs)
    remembered = recent(ChoiceUse(0, 0, 100, use, {55: Place(2, 7)}))
    answer = explained(remembered)
    assert json.loads(json.dumps(answer)) == answer
    [choice] = answer["choices"]
    assert choice["cached_tokens"] == {"device": 32, "dram": 0, "redis": 16}
    assert choice["load_ms"] == 1.25
    spans = [(run["first_token"], run["end_token"]) for run in choice["runs"]]
    assert spans == [(0, 32), (32, 48), (48, 64), (64, 96), (96, 100)]
    diverged = choice["runs"][2]
    assert (diverged["diverged_at"], diverged["message"], diverged["message_token"]) == (55, 2, 7)
    assert text_lines(answer) == [
        "chat on m/0 (m) for acme, ended 2023-11-14 22:13:20 UTC",
        "48 of 100 prompt tokens cached (32 device, 16 redis), waited 1.2 ms for loads",
        "  blocks 0-1, tokens 0-31: hit, was on the device",
        "  block 2, tokens 32-47: hit, was loaded from Redis",
        "  block 3, tokens 48-63: miss, the nearest cached prompt begins the same and then "
        "differs: at token 7 of messages[2]",
        "  blocks 4-5, tokens 64-95: miss, a block before it was missing, and a hit ends at the "
        "first gap",
        "  block 6, tokens 96-99: miss, the block is not full or holds the prompt's last token, "
        "which is always computed",
        "next: put what changes between requests (dates, ids, retrieved text) behind what stays "
        "the same",
    ]


@pytest.mark.parametrize("tokens", [31, 32])
def test_a_hit_to_the_end_says_why_one_token_less_is_cached(tokens: int) -> None:
    use = CacheUse(16, device_tokens=tokens - 1, runs=(BlockRun(0, 2, Tier.DEVICE),))
    [_, headline, line] = text_lines(explained(recent(ChoiceUse(0, 0, tokens, use, {}))))
    assert headline.startswith(f"{tokens - 1} of {tokens} prompt tokens cached")
    assert line.startswith(f"  blocks 0-1, tokens 0-{tokens - 1}: hit, was on the device; the last")


def test_what_a_remote_server_answered_is_to_be_asked_there() -> None:
    headline, reason = text_lines(explained(recent()))
    assert headline.startswith("chat on m/0 (m) for acme")
    assert reason.startswith("it ran on a server elsewhere")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (None, "at token 5 of the prompt"),
        (
            Place(None, 5),
            "at token 5 of the prompt, in what the chat template puts before the first message",
        ),
        (Place(0, 2), "at token 2 of messages[0]"),
    ],
)
def test_where_a_prompt_diverged(place: Place | None, words: str) -> None:
    places = {5: place} if place else {}
    choice = one(BlockRun(0, 1, None, Miss.DIVERGED, 5), places=places)
    [run] = explained(recent(choice))["choices"][0]["runs"]
    assert run["why"].endswith(f": {words}")


def test_several_choices_are_told_apart_and_a_step_is_said_once() -> None:
    miss = BlockRun(0, 1, None, Miss.TIER_DOWN)
    use = CacheUse(16, runs=(miss,))
    choices = [ChoiceUse(i, i // 2, 17, use, {}) for i in range(3)]
    lines = text_lines(explained(recent(*choices, ChoiceUse(3, 1, 17, None, {}))))
    assert lines[1].startswith("choice 0 (prompt 0): 0 of 17")
    assert lines[-2] == "choice 3 (prompt 1): ended before it ran, so nothing was looked up"
    assert [line for line in lines if line.startswith("next:")] == [lines[-1]]
    assert "forebay_cache_tier_up" in lines[-1]
