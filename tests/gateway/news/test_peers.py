"""Who is alive and what they have under way."""

from __future__ import annotations

from gateway.news.fleet_news import NO_LOAD, FleetNews, LocalNews, NewsCounts, OwnLoad
from gateway.news.peers import SILENCE_S, Peers

ONE, TWO = b"gateway1", b"gateway2"


def test_the_others_are_summed_and_the_latest_word_counts() -> None:
    peers = Peers()
    peers.hear(ONE, {"a": OwnLoad(9, 9, 9, 9)}, 0.0)
    peers.hear(ONE, {"a": OwnLoad(1, 2, 3, 4), "b": OwnLoad(running=1)}, 0.1)
    peers.hear(TWO, {"a": OwnLoad(10, 20, 30, 40)}, 0.2)
    assert peers.foreign("a", 0.3) == OwnLoad(11, 22, 33, 44)
    assert peers.foreign("b", 0.3) == OwnLoad(running=1)
    assert peers.foreign("c", 0.3) == NO_LOAD
    peers.hear(ONE, {}, 0.4)
    assert peers.foreign("b", 0.4) == NO_LOAD
    assert peers.live(0.4) == 2


def test_the_silent_count_nothing_and_may_come_back() -> None:
    peers = Peers()
    peers.hear(ONE, {"a": OwnLoad(waiting=1)}, 0.0)
    peers.hear(TWO, {"a": OwnLoad(waiting=2)}, 1.0)
    assert peers.foreign("a", SILENCE_S - 0.01) == OwnLoad(waiting=3)
    assert peers.foreign("a", SILENCE_S) == OwnLoad(waiting=2)
    assert peers.live(SILENCE_S) == 1
    peers.hear(ONE, {"a": OwnLoad(waiting=1)}, 2.0)
    assert peers.foreign("a", 2.0) == OwnLoad(waiting=3)
    assert peers.live(1.0 + SILENCE_S) == 1
    assert peers.live(2.0 + SILENCE_S) == 0
    assert peers.foreign("a", 2.0 + SILENCE_S) == NO_LOAD


def test_who_leaves_is_gone_at_once() -> None:
    peers = Peers()
    peers.hear(ONE, {"a": OwnLoad(running=1)}, 0.0)
    peers.leave(ONE)
    peers.leave(TWO)
    assert peers.foreign("a", 0.0) == NO_LOAD
    assert peers.live(0.0) == 0


def test_one_gateway_has_nobody_to_hear() -> None:
    news: FleetNews = LocalNews()
    news.routed("a", [b"x" * 16])
    news.loads({"a": OwnLoad(running=1)})
    assert news.foreign("a", 0.0) == NO_LOAD
    assert (news.gateways, news.degraded, news.counts) == (1, False, NewsCounts())
