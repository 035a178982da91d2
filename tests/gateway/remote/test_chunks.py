"""From a server's chunks to the client's, the short way and the long one."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.remote.body import read_body
from gateway.remote.chunks import Chunks
from gateway.remote.failures import Cleaner, UpstreamLost
from gateway.remote.skeleton import learn
from tests.gateway.remote.remote_stage import chat

CLEANER = Cleaner(secrets=[], hosts=[], served_model="served", model="m")
WRITERS = {
    "compact": lambda value: json.dumps(value, separators=(",", ":")).encode(),
    "spaced": lambda value: json.dumps(value).encode(),
    "utf-8": lambda value: json.dumps(value, ensure_ascii=False).encode(),
    "orjson": orjson.dumps,
}
TRICKY = [
    '"',
    "\\",
    '\\"',
    "\n",
    "\u2028",
    "\x85",
    "🦊",
    "served",
    '"content":"a"',
    "",
    "\x7f",
    "ü",
]
texts = st.lists(st.one_of(st.sampled_from(TRICKY), st.text(max_size=6)), max_size=12)


def chunks_of(body: dict) -> Chunks:
    return Chunks(read_body(body, "chat"), "m")


def taken(chunks: Chunks, *events: bytes) -> bytes:
    frames = bytearray()
    chunks.take(events, CLEANER, frames)
    return bytes(frames)


def as_chunk(index: int, delta: dict, finish: str | None = None, **more: object) -> dict:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {"id": "i", "created": 1, "model": "served", "choices": [choice], **more}


@settings(max_examples=60, deadline=None)
@given(texts, st.sampled_from(sorted(WRITERS)), st.sampled_from(["content", "reasoning_content"]))
def test_every_chunk_arrives_as_it_was_sent_under_our_name(pieces, writer, name):
    chunks, write = chunks_of(chat(stream=True)), WRITERS[writer]
    sent = [as_chunk(0, {name: piece}) for piece in pieces]
    said = ""
    for chunk in sent:
        frame = taken(chunks, write(chunk))
        assert frame.decode().splitlines() == [frame.decode()[:-2], ""]
        got = orjson.loads(frame.removeprefix(b"data: "))
        assert got == {**chunk, "model": "m"}
        said += got["choices"][0]["delta"][name]
    assert said == "".join(pieces)
    assert chunks.content_events == sum(bool(piece) for piece in pieces)
    # what was said is remembered to the character, whichever way it went
    chunks.begin_again()
    again = as_chunk(0, {name: said + "!"})
    last = orjson.loads(taken(chunks, write(again)).removeprefix(b"data: "))
    assert last["choices"][0]["delta"] == {name: "!"}


@settings(max_examples=60, deadline=None)
@given(texts, st.data())
def test_chunks_that_come_together_are_the_same_as_one_by_one(pieces, data):
    sent = [orjson.dumps(as_chunk(0, {"content": piece})) for piece in pieces]
    one_by_one, together = chunks_of(chat(stream=True)), chunks_of(chat(stream=True))
    expected = b"".join(taken(one_by_one, event) for event in sent)
    got, start = b"", 0
    while start < len(sent):
        end = data.draw(st.integers(start + 1, len(sent)))
        got += taken(together, *sent[start:end])
        start = end
    assert got == expected
    assert together.content_events == one_by_one.content_events
    together.begin_again()
    said = "".join(pieces)
    more = taken(together, orjson.dumps(as_chunk(0, {"content": said + "!"})))
    assert orjson.loads(more.removeprefix(b"data: "))["choices"][0]["delta"] == {"content": "!"}


@pytest.mark.parametrize("tier", [None, "flex"])
@pytest.mark.parametrize("servers", [{}, {"service_tier": "scale"}, {"service_tier": None}])
def test_of_the_tier_a_client_hears_our_word_alone(tier, servers):
    """In chunks that are read and in those that are not, and in what follows the last of them."""
    body = chat(stream=True, stream_options={"include_usage": True})
    chunks = Chunks(read_body(body, "chat"), "m", tier)
    sent = [as_chunk(0, {"role": "assistant", "content": ""}, **servers)]
    sent += [as_chunk(0, {"content": f"word {number}"}, **servers) for number in range(8)]
    sent.append(as_chunk(0, {}, finish="stop", **servers))
    usage = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    sent.append({**as_chunk(0, {}, **servers), "choices": [], "usage": usage})
    frames = b"".join(taken(chunks, orjson.dumps(chunk)) for chunk in sent) + chunks.ending()
    said = [
        orjson.loads(event.removeprefix(b"data: "))
        for event in frames.strip().split(b"\n\n")
        if event != b"data: [DONE]"
    ]
    assert len(said) == len(sent)
    for chunk in said:
        assert chunk.get("service_tier", "nothing") == (tier or "nothing")
        assert chunk["model"] == "m"
    assert said[5]["choices"][0]["delta"]["content"] == "word 4"


def test_half_a_character_in_each_of_two_chunks_is_no_text():
    chunks = chunks_of(chat(stream=True))
    chunk = orjson.dumps(as_chunk(0, {"content": "PLACE"}))
    taken(chunks, chunk)
    first, second = (chunk.replace(b"PLACE", half) for half in (b"\xc3", b"\xa9"))
    with pytest.raises(UpstreamLost):
        taken(chunks, chunk, first, second)
    assert chunks.content_events == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([*TRICKY, "a", "b"])), max_size=20))
def test_choices_are_not_mixed_up(pieces):
    chunks, said = Chunks(read_body(chat(stream=True, n=3), "chat"), "m"), ["", "", ""]
    for index, piece in pieces:
        frame = taken(chunks, orjson.dumps(as_chunk(index, {"content": piece})))
        choice = orjson.loads(frame.removeprefix(b"data: "))["choices"][0]
        said[choice["index"]] += choice["delta"]["content"]
    for index in range(3):
        assert said[index] == "".join(piece for at, piece in pieces if at == index)


def test_a_chunk_that_differs_in_more_than_its_text_is_read_whole():
    chunks = chunks_of(chat(stream=True))
    for i in range(4):
        taken(chunks, orjson.dumps(as_chunk(0, {"content": f"a{i}"})))
    assert not chunks.complete
    end = taken(chunks, orjson.dumps(as_chunk(0, {"content": "b"}, finish="stop")))
    assert b'"finish_reason":"stop"' in end
    assert chunks.complete


@pytest.mark.parametrize("raw", [b'x","role":"y', b"\\ud800", b"\xff", b"\\", b'a"', b"\t"])
def test_a_text_that_json_would_not_read_so_is_no_text(raw):
    chunks = chunks_of(chat(stream=True))
    chunk = orjson.dumps(as_chunk(0, {"content": "PLACE"}))
    taken(chunks, chunk)
    other = chunk.replace(b"PLACE", raw)
    try:
        expected = orjson.loads(other)
    except orjson.JSONDecodeError:
        with pytest.raises(UpstreamLost):
            taken(chunks, other)
    else:
        got = orjson.loads(taken(chunks, other).removeprefix(b"data: "))
        assert got == {**expected, "model": "m"}


def test_a_text_whose_place_is_not_certain_teaches_nothing():
    twice = as_chunk(0, {"content": "a"}, content="a")
    assert learn(orjson.dumps(twice), twice, {}, []) is None
    elsewhere = as_chunk(0, {"content": "\x01"}, other={"content": "\\u0001"})
    assert learn(orjson.dumps(elsewhere), elsewhere, {}, []) is not None


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 1, "completion_tokens": 1}])
def test_a_usage_that_was_not_asked_for_is_taken_out_of_every_chunk(usage):
    chunks = chunks_of(chat(stream=True))
    for i in range(4):
        chunk = as_chunk(0, {"content": f"a{i}"}, usage=usage)
        assert b"usage" not in taken(chunks, orjson.dumps(chunk))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"5", b"{", b'{"choices":5}', b'{"choices":[5]}', b'{"choices":[{"index":9}]}'],
)
def test_what_is_no_chunk_is_a_loss(data):
    with pytest.raises(UpstreamLost):
        taken(chunks_of(chat(stream=True)), data)
