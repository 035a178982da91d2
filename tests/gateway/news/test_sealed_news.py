"""Only gateways with the secret tell and read news."""

from __future__ import annotations

import pytest

from gateway.news.sealed_news import NewsKind, NewsSealer


def test_another_gateway_opens_it_and_knows_whose_it_is() -> None:
    here, there = NewsSealer(b"secret"), NewsSealer(b"secret")
    message = here.seal(NewsKind.ROUTED, b"plain words")
    assert there.open(NewsKind.ROUTED, message) == (here.gateway, b"plain words")
    assert here.is_own(message)
    assert not there.is_own(message)
    assert b"plain words" not in message
    assert here.seal(NewsKind.ROUTED, b"plain words") != message


def test_nobody_else_opens_it_and_nothing_of_it_can_be_changed() -> None:
    here, there = NewsSealer(b"secret"), NewsSealer(b"secret")
    message = here.seal(NewsKind.ROUTED, b"")
    assert NewsSealer(b"another").open(NewsKind.ROUTED, message) is None
    assert there.open(NewsKind.LOADS, message) is None
    for at in range(len(message)):
        changed = bytearray(message)
        changed[at] ^= 1
        assert there.open(NewsKind.ROUTED, bytes(changed)) is None


@pytest.mark.parametrize("length", [0, 1, 9, 36])
def test_what_is_too_short_is_nothing(length: int) -> None:
    here, there = NewsSealer(b"secret"), NewsSealer(b"secret")
    message = here.seal(NewsKind.LOADS, b"")
    assert there.open(NewsKind.LOADS, message[:length]) is None
