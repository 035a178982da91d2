"""What news cost: `python -m gateway.news.bench_news`.

For three kinds of traffic it prints how many bytes per second one gateway gives Redis (which hands
them to each gateway, this one included) and how long a decision takes to be told and to be heard.
No Redis takes part. Links are as long as real ones; what they stand for does not matter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from time import perf_counter

from gateway.news.hearing import Hearing
from gateway.news.messages import pack_routed, unpack_routed
from gateway.news.sealed_news import NewsKind, NewsSealer
from gateway.news.telling import Telling

_RATE = 100  # decisions per second
_SECONDS = 60
_PROMPT_LINKS = 256  # 4,096 tokens
_TURN_LINKS = 12
_REPLICAS = 8
_PACE_S = 0.05

_Traffic = Iterator[tuple[str, tuple[bytes, ...]]]


def _links(draw: random.Random, count: int) -> tuple[bytes, ...]:
    return tuple(draw.randbytes(16) for _ in range(count))


def _unique(draw: random.Random) -> _Traffic:
    """Every prompt is new."""
    while True:
        yield f"replica-{draw.randrange(_REPLICAS)}", _links(draw, _PROMPT_LINKS)


def _shared(draw: random.Random) -> _Traffic:
    """Nine tenths of each prompt are one of 50 beginnings."""
    common = _PROMPT_LINKS * 9 // 10
    beginnings = [_links(draw, common) for _ in range(50)]
    while True:
        which = draw.randrange(len(beginnings))
        links = beginnings[which] + _links(draw, _PROMPT_LINKS - common)
        yield f"replica-{which % _REPLICAS}", links


def _conversations(draw: random.Random) -> _Traffic:
    """A thousand conversations that grow to the full length by a turn each and then end."""
    open_ones = [_links(draw, draw.randrange(_PROMPT_LINKS)) for _ in range(1000)]
    while True:
        which = draw.randrange(len(open_ones))
        longer = open_ones[which] + _links(draw, _TURN_LINKS)
        open_ones[which] = longer if len(longer) <= _PROMPT_LINKS else _links(draw, _TURN_LINKS)
        yield f"replica-{which % _REPLICAS}", open_ones[which]


def measure(traffic: _Traffic, seconds: int) -> tuple[float, float, float]:
    """Bytes per second of traffic, and seconds of work per decision of who tells and who hears."""
    telling, hearing = Telling(), Hearing()
    here, there = NewsSealer(b"secret"), NewsSealer(b"secret")
    tell_s = hear_s = 0.0
    sent_bytes = 0
    per_turn = int(_RATE * _PACE_S)
    for turn in range(int(seconds / _PACE_S)):
        now_s = turn * _PACE_S
        decisions = [next(traffic) for _ in range(per_turn)]
        began_s = perf_counter()
        for replica, links in decisions:
            telling.add(replica, links)
        news = telling.take(now_s)
        messages = [here.seal(NewsKind.ROUTED, pack_routed(each)) for each in news]
        tell_s += perf_counter() - began_s
        sent_bytes += sum(map(len, messages))
        began_s = perf_counter()
        for message in messages:
            opened = there.open(NewsKind.ROUTED, message)
            if opened is None:
                raise RuntimeError("a gateway with the same secret opens a message")
            sender, plain = opened
            for _ in hearing.hear(sender, unpack_routed(plain), now_s):
                pass
        hear_s += perf_counter() - began_s
    if hearing.heard != telling.told or hearing.unresolved:
        raise RuntimeError("not everything that was told was heard")
    return sent_bytes / seconds, tell_s / telling.told, hear_s / telling.told


def main(seconds: int = _SECONDS) -> None:
    """Print a line for each kind of traffic."""
    whole = _RATE * _PROMPT_LINKS * 16
    sys.stdout.write(
        f"{_RATE} prompts of {_PROMPT_LINKS * 16} tokens per second; "
        f"told whole they would be {whole / 1e3:.0f} kB/s\n"
    )
    kinds = {"unique": _unique, "shared": _shared, "conversations": _conversations}
    for name, kind in kinds.items():
        rate, tell_s, hear_s = measure(kind(random.Random(0)), seconds)
        sys.stdout.write(
            f"{name}: {rate / 1e3:.1f} kB/s, told in {tell_s * 1e6:.1f} us, "
            f"heard in {hear_s * 1e6:.1f} us per decision\n"
        )


if __name__ == "__main__":
    main()
