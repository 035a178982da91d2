"""How values become events."""

from __future__ import annotations

import json

import pytest

from gateway.sse import event


@pytest.mark.parametrize("character", [*"\r\n\v\f\x1c\x1d\x1e", "\x85", "\u2028", "\u2029"])
def test_no_client_sees_a_line_end_inside_an_event(character: str) -> None:
    value = {"content": f"東京{character}🦊"}
    sent = event(value).decode()
    assert sent.splitlines() == [sent.removesuffix("\n\n"), ""]
    assert json.loads(sent.removeprefix("data: ")) == value
