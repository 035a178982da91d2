"""Who wants to know that a client has gone hears of it, once."""

from __future__ import annotations

from gateway.client_link import ClientLink


def test_listeners_hear_of_the_end_unless_they_have_left():
    heard: list[str] = []
    link = ClientLink(lambda: heard.append("read on"))

    def one() -> None:
        heard.append("one")

    def other() -> None:
        heard.append("other")

    link.listen(one)
    link.listen(other)
    link.forget(one)
    link.forget(one)
    assert heard == ["read on", "read on"]
    link.lost()
    assert heard[2:] == ["other"]


def test_whoever_comes_too_late_hears_of_it_at_once():
    heard: list[str] = []
    link = ClientLink(lambda: heard.append("read on"))
    link.lost()
    link.listen(lambda: heard.append("gone"))
    assert heard == ["gone"]
