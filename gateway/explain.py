"""Why a prompt hit or missed the cache: from what is remembered to JSON, and from that to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from cache.block import Tier
from cache.report import BlockRun, Miss

if TYPE_CHECKING:  # the command line shows these texts, and must not load the engine for it
    from gateway.recent_requests import ChoiceUse, RecentRequest
    from gateway.turns import Place


@dataclass(frozen=True, slots=True)
class Reason:
    """A miss in plain words, and what to do or look at, where there is something."""

    words: str
    next_step: str | None = None


REASONS: Final[Mapping[Miss, Reason]] = {
    Miss.NEVER_SEEN: Reason("no prompt with these tokens after this beginning was cached here"),
    Miss.DIVERGED: Reason(
        "the nearest cached prompt begins the same and then differs",
        "put what changes between requests (dates, ids, retrieved text) behind what stays the same",
    ),
    Miss.EVICTED: Reason(
        "it was cached and has been pushed out of every tier",
        "see forebay_cache_evictions_total; raise the model's cache.device or cache.dram, "
        "redis.memory, or the tenant's floors and quotas",
    ),
    Miss.OTHER_SALT: Reason(
        "the same text is, or was, cached for another tenant, user or salt, and is not shared",
        "send the same user, cache_salt and prompt_cache_key each time, or declare text that is "
        "everybody's under shared_prefixes",
    ),
    Miss.LOAD_SLOWER: Reason(
        "computing it was predicted to be faster than fetching it from a lower tier",
        "see forebay_cache_load_seconds_total over forebay_cache_loads_total for what loads take",
    ),
    Miss.TIER_DOWN: Reason(
        "Redis did not answer",
        "see forebay_cache_tier_up and the log, and whether Redis runs and redis.url is right",
    ),
    Miss.LATE: Reason(
        "it was found, and did not arrive in the time that computing it takes",
        "see whether Redis is near and not overloaded",
    ),
    Miss.CORRUPT: Reason(
        "what Redis held was damaged, and was not used",
        "see forebay_cache_misses_total with reason corrupt; if it grows, look at what else "
        "writes there",
    ),
    Miss.FOREIGN: Reason(
        "Redis held something of another model, owner or text under the block's key, or stored it "
        "under the other setting of redis.encrypt",
        "see what else writes to this Redis, or give KV its own with redis.kv_url; forebays that "
        "share one must agree on redis.encrypt",
    ),
    Miss.NO_ROOM: Reason(
        "there was no free room to load it into",
        "raise the model's cache.device or cache.dram, or the tenant's quotas",
    ),
    Miss.AFTER_GAP: Reason("a block before it was missing, and a hit ends at the first gap"),
    Miss.NOT_READ: Reason(
        "the request did not read the cache",
        "requests for prompt logprobs do not, nor do tenants of scope none, nor those of scope "
        "user where a request names no user",
    ),
    Miss.LAST_TOKEN: Reason(
        "the block is not full or holds the prompt's last token, which is always computed"
    ),
}


_ELSEWHERE: Final = (
    "it ran on a server elsewhere, whose cache is not seen from here: ask there for hits and misses"
)
_LAST_COMPUTED: Final = (
    "; the last token of a prompt is computed all the same: the answer begins from what it gives"
)


def explained(recent: RecentRequest) -> dict[str, Any]:
    """A remembered request as JSON."""
    return {
        "tenant": recent.tenant,
        "model": recent.model,
        "replica": recent.replica,
        "endpoint": recent.endpoint,
        "ended": int(recent.ended),
        "choices": [_choice(choice) for choice in recent.choices],
    }


def text_lines(answer: Mapping[str, Any]) -> list[str]:
    """What `explained` gave, for people: each run on a line, and the next steps, each once. A
    request without choices was answered by a remote server."""
    ended = datetime.fromtimestamp(answer["ended"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lines = [
        f"{answer['endpoint']} on {answer['replica']} ({answer['model']}) for {answer['tenant']}, "
        f"ended {ended}"
    ]
    choices = answer["choices"]
    if not choices:
        return [*lines, _ELSEWHERE]
    for choice in choices:
        lines.append(_headline(choice, alone=len(choices) == 1))
        lines += [_line(run, choice["prompt_tokens"]) for run in choice["runs"]]
    runs = [run for choice in choices for run in choice["runs"]]
    steps = dict.fromkeys(run["next_step"] for run in runs if run["next_step"])
    return lines + [f"next: {step}" for step in steps]


def _choice(choice: ChoiceUse) -> dict[str, Any]:
    use = choice.use
    return {
        "choice": choice.choice,
        "prompt": choice.prompt,
        "prompt_tokens": choice.prompt_tokens,
        "ran": use is not None,
        "block_tokens": use.block_tokens if use else None,
        "cached_tokens": {
            "device": use.device_tokens if use else 0,
            "dram": use.dram_tokens if use else 0,
            "redis": use.redis_tokens if use else 0,
        },
        "load_ms": round(use.load_s * 1e3, 3) if use else 0.0,
        "runs": [
            _run(run, use.block_tokens, choice.prompt_tokens, choice.places) for run in use.runs
        ]
        if use
        else [],
    }


def _run(
    run: BlockRun, block_tokens: int, prompt_tokens: int, places: Mapping[int, Place]
) -> dict[str, Any]:
    reason = REASONS[run.miss] if run.miss is not None else None
    place = places.get(run.diverged_at) if run.diverged_at is not None else None
    return {
        "first_block": run.first,
        "blocks": run.blocks,
        "first_token": run.first * block_tokens,
        "end_token": min((run.first + run.blocks) * block_tokens, prompt_tokens),
        "tier": run.tier.value if run.tier is not None else None,
        "miss": run.miss.value if run.miss is not None else None,
        "diverged_at": run.diverged_at,
        "message": place.message if place else None,
        "message_token": place.token if place and place.message is not None else None,
        "why": _why(run, reason, place),
        "next_step": reason.next_step if reason else None,
    }


def _why(run: BlockRun, reason: Reason | None, place: Place | None) -> str:
    if reason is None:
        return "computed" if run.tier is None else _FOUND[run.tier]
    if run.diverged_at is None:
        return reason.words
    if place is None:
        return f"{reason.words}: at token {run.diverged_at} of the prompt"
    if place.message is None:
        return (
            f"{reason.words}: at token {run.diverged_at} of the prompt, in what the chat template "
            "puts before the first message"
        )
    return f"{reason.words}: at token {place.token} of messages[{place.message}]"


_FOUND: Final[Mapping[Tier, str]] = {
    Tier.DEVICE: "was on the device",
    Tier.DRAM: "was loaded from DRAM",
    Tier.REDIS: "was loaded from Redis",
}


def _headline(choice: Mapping[str, Any], *, alone: bool) -> str:
    name = "" if alone else f"choice {choice['choice']} (prompt {choice['prompt']}): "
    if not choice["ran"]:
        return f"{name}ended before it ran, so nothing was looked up"
    cached: Mapping[str, int] = choice["cached_tokens"]
    by_tier = ", ".join(f"{tokens} {tier}" for tier, tokens in cached.items() if tokens)
    return (
        f"{name}{sum(cached.values())} of {choice['prompt_tokens']} prompt tokens cached"
        f"{f' ({by_tier})' if by_tier else ''}, waited {choice['load_ms']:.1f} ms for loads"
    )


def _line(run: Mapping[str, Any], prompt_tokens: int) -> str:
    last_block = run["first_block"] + run["blocks"] - 1
    blocks = _range("block", run["first_block"], last_block)
    tokens = _range("token", run["first_token"], run["end_token"] - 1)
    fate = "hit" if run["tier"] else "miss"
    to_the_end = run["tier"] and run["end_token"] == prompt_tokens
    return f"  {blocks}, {tokens}: {fate}, {run['why']}{_LAST_COMPUTED if to_the_end else ''}"


def _range(what: str, first: int, last: int) -> str:
    return f"{what} {first}" if last <= first else f"{what}s {first}-{last}"
