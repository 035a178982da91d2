"""What is told once is left out afterwards, and heard all the same."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.news.hearing import Hearing
from gateway.news.messages import MOST_LINKS, Decision, RoutedNews, pack_routed, unpack_routed
from gateway.news.telling import GENERATION_S, MOST_TOLD_LINKS, Telling
from tests.gateway.news.prefixes import long_prefix, prefix

SENDER = b"sender 1"


def heard(hearing: Hearing, messages: list[RoutedNews], now_s: float = 0.0) -> list[object]:
    """What comes out, after a way over the wire."""
    return [
        (replica, tuple(links))
        for news in messages
        for replica, links in hearing.hear(SENDER, unpack_routed(pack_routed(news)), now_s)
    ]


def told_links(messages: list[RoutedNews]) -> int:
    return sum(len(decision.links) for news in messages for decision in news.decisions)


def test_only_what_is_new_for_a_replica_is_told() -> None:
    telling = Telling()
    telling.add("a", prefix("system one"))
    telling.add("a", prefix("system two"))
    telling.add("a", prefix("system one"))
    telling.add("b", prefix("system"))
    (news,) = telling.take(0.0)
    one, two = prefix("system one"), prefix("system two")
    assert news.decisions == (
        Decision("a", None, one),
        Decision("a", one[6], two[7:]),
        Decision("a", one[-1], ()),
        Decision("b", None, prefix("system")),
    )
    assert heard(Hearing(), [news]) == [("a", one), ("a", two), ("a", one), ("b", one[:6])]


ACTION = st.one_of(
    st.tuples(st.sampled_from("ab"), st.text("xy", min_size=1, max_size=9)),
    st.sampled_from(["take", "lose", "miss", "later", "generation"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, max_size=40))
def test_a_listener_hears_what_was_told_whatever_is_lost(actions: list[object]) -> None:
    telling, hearing, now_s = Telling(), Hearing(), 0.0
    waiting: list[object] = []
    missed_any = False
    for action in [*actions, "take"]:
        if isinstance(action, tuple):
            replica, text = action
            telling.add(replica, prefix(text))
            waiting.append((replica, prefix(text)))
        elif action == "later":
            now_s += 1.0
        elif action == "generation":
            now_s += GENERATION_S
            missed_any = False
        else:
            messages = telling.take(now_s)
            if action == "lose":  # the sender knows
                telling.lost(messages, now_s)
                missed_any = False
            elif action == "miss":  # it does not: the listener was not there
                missed_any = missed_any or bool(messages)
            else:
                result = heard(hearing, messages, now_s)
                if missed_any:  # each is either whole or left out, in order
                    rest = iter(waiting)
                    assert all(each in rest for each in result)
                else:
                    assert result == waiting
            waiting.clear()
    assert telling.waiting == 0


def test_who_missed_the_beginning_understands_the_next_generation() -> None:
    telling, hearing = Telling(), Hearing()
    telling.add("a", prefix("abc"))
    telling.take(0.0)
    telling.add("a", prefix("abcd"))
    assert heard(hearing, telling.take(GENERATION_S - 1)) == []
    assert hearing.unresolved == 1
    telling.add("a", prefix("abcd"))
    assert heard(hearing, telling.take(GENERATION_S)) == [("a", prefix("abcd"))]


def test_a_long_prompt_is_cut_into_messages_and_heard_once() -> None:
    telling, hearing = Telling(), Hearing()
    long = long_prefix(1, 3 * MOST_LINKS + 5)
    telling.add("a", prefix("ab"))
    telling.add("a", long)
    telling.add("a", long[:MOST_LINKS])
    messages = telling.take(0.0)
    assert len(messages) == 5
    assert max(len(pack_routed(news)) for news in messages) < 4_300
    assert heard(hearing, messages) == [("a", prefix("ab")), ("a", long), ("a", long[:MOST_LINKS])]
    assert telling.told == 3


def test_a_part_that_is_missed_leaves_the_prompt_out() -> None:
    telling, hearing = Telling(), Hearing()
    telling.add("a", long_prefix(1, 3 * MOST_LINKS))
    first, _, last = telling.take(0.0)
    assert heard(hearing, [first, last]) == []
    assert (hearing.heard, hearing.unresolved) == (0, 1)


def test_what_waits_is_bounded_and_the_oldest_is_dropped() -> None:
    telling = Telling()
    for seed in range(10_000):
        telling.add("a", long_prefix(seed, 1))
    assert telling.waiting == 4_096
    assert telling.dropped == 10_000 - 4_096
    telling.add("a", ())
    assert telling.waiting == 4_096
    newest = []
    while messages := telling.take(0.0):
        newest += messages
    assert newest[-1].decisions[-1].links == long_prefix(9_999, 1)
    for seed in range(5):
        telling.add("a", long_prefix(seed, 2 * MOST_TOLD_LINKS))
    assert telling.waiting == 2  # by their links
    assert telling.told + telling.dropped + telling.waiting == 10_005


def test_one_turn_takes_a_bounded_part() -> None:
    telling = Telling()
    for seed in range(1_000):
        telling.add("a", long_prefix(seed, 1))
    taken = sum(len(news.decisions) for news in telling.take(0.0))
    assert 256 <= taken <= 17 * 16
    assert telling.waiting == 1_000 - taken


def test_both_sides_remember_a_bounded_number_of_links() -> None:
    telling, hearing = Telling(), Hearing()
    prompts = [long_prefix(seed, 20_000) for seed in range(5)]
    result = []
    for links in prompts:
        telling.add("a", links)
        result += heard(hearing, telling.take(0.0))
        assert hearing.links <= MOST_TOLD_LINKS
    assert result == [("a", links) for links in prompts]
    telling.add("a", long_prefix(9, 2 * MOST_TOLD_LINKS))
    assert heard(hearing, telling.take(0.0)) == [("a", long_prefix(9, MOST_TOLD_LINKS))]


def test_senders_are_forgotten_in_time_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.news.hearing._MOST_SENDERS", 16)
    hearing = Hearing()

    def hear(sender: int, now_s: float) -> None:
        news = RoutedNews(0, (Decision("a", None, prefix("abc")),))
        assert len(list(hearing.hear(sender.to_bytes(8, "big"), news, now_s))) == 1

    for sender in range(40):
        hear(sender, 0.0)
    assert hearing.links == 16 * 3
    hear(40, 2 * GENERATION_S + 1)
    assert hearing.links == 3


def test_many_gateways_are_all_followed() -> None:
    """However many take turns, what each of them goes on after is remembered."""
    hearing = Hearing()
    senders = [(number.to_bytes(8, "big"), Telling()) for number in range(40)]
    for turn in range(5):
        for sender, telling in senders:
            links = long_prefix(0, 50) + long_prefix(turn + 1, 2)
            telling.add("a", links)
            [news] = telling.take(float(turn))
            assert list(hearing.hear(sender, news, float(turn))) == [("a", list(links))]
    assert (hearing.heard, hearing.unresolved) == (200, 0)
    assert hearing.links == 40 * (50 + 5 * 2)


def test_what_all_senders_told_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was not heard for longest is forgotten, and heard again from its next generation."""
    monkeypatch.setattr("gateway.news.hearing._MOST_LINKS", 250)
    hearing = Hearing()

    def hear(sender: int, generation: int, *decisions: Decision) -> int:
        news = RoutedNews(generation, decisions)
        return len(list(hearing.hear(sender.to_bytes(8, "big"), news, 0.0)))

    for sender in range(3):
        assert hear(sender, 0, Decision("a", None, long_prefix(sender, 100))) == 1
        assert hearing.links <= 250
    assert hear(1, 0, Decision("a", long_prefix(1, 100)[-1], ())) == 1
    assert hear(0, 0, Decision("a", long_prefix(0, 100)[-1], ())) == 0
    assert hear(0, 1, Decision("a", None, long_prefix(0, 300))) == 1
    assert hearing.links == 300  # of the one that speaks, whatever it may tell
    assert hear(1, 1, Decision("a", None, prefix("a"))) == 1
    assert hearing.links <= 250


def test_links_that_collide_make_no_ring() -> None:
    a, b, c = prefix("abc")
    hearing = Hearing()
    news = RoutedNews(0, (Decision("r", None, (a, b, a, c, b)), Decision("r", c, (a,))))
    found = list(islice(hearing.hear(SENDER, news, 0.0), 5))
    assert found == [("r", [a, b]), ("r", [a])]


def test_nothing_is_learned_beyond_what_a_sender_may_tell() -> None:
    hearing = Hearing()
    many = RoutedNews(0, (Decision("a", None, long_prefix(1, MOST_TOLD_LINKS)),))
    assert len(list(hearing.hear(SENDER, many, 0.0))) == 1
    more = RoutedNews(0, (Decision("a", None, prefix("ab")), Decision("a", None, ())))
    assert list(hearing.hear(SENDER, more, 0.0)) == [("a", [])]
    assert hearing.unresolved == 1
