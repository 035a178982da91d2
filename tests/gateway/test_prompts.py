"""Where prompts are tokenized."""

from __future__ import annotations

import threading

import pytest

from tests.gateway.fakes import ByteTokenizer
from tests.gateway.stage import COMPLETIONS, Stage, error_of, prompt


@pytest.mark.parametrize(
    ("text", "on_loop"),
    [("short", True), ("x" * 9000, False), (["x" * 300] * 4, True), (["x" * 300] * 40, False)],
)
async def test_much_text_is_tokenized_off_the_event_loop(monkeypatch, text, on_loop):
    threads = set()
    encode = ByteTokenizer.encode_prompt

    def noting(self, text):
        threads.add(threading.current_thread() is threading.main_thread())
        return encode(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode_prompt", noting)
    response = await Stage(max_context=16_384).post(COMPLETIONS, prompt(text, max_tokens=1))
    assert response.status_code == 200
    assert threads == {on_loop}


async def test_what_cannot_fit_is_refused_without_tokenizing_it(monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode_prompt", lambda *_: pytest.fail("tokenized"))
    response = await Stage().post(COMPLETIONS, prompt("x" * 2048))
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "context is 512 tokens" in error["message"]
    assert "has at least 512" in error["message"]
