"""Blocks to store, and a way to wait for the tier's callbacks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cache.block import BlockKey, Owner
from cache.envelope import Envelope
from cache.redis_store import Fetched, Probe, RedisOptions, RedisStore, RedisTier

TOKENS = 16
PAYLOAD_BYTES = 20_000
SECRET = b"the server's secret"
ACME = Owner(b"acme____", bytes(8))
BETA = Owner(b"beta____", bytes(8))


class Once:
    """A callback that remembers every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.threads: list[str] = []
        self._called = threading.Event()

    def __call__(self, answer: Any) -> None:
        self.calls.append(answer)
        self.threads.append(threading.current_thread().name)
        self._called.set()

    def wait(self, timeout_s: float = 10.0) -> Any:
        assert self._called.wait(timeout_s), "the callback was not called"
        return self.calls[0]


def envelope(
    store: RedisStore | None = None,
    identity: bytes = b"i" * 32,
    payload_bytes: int = PAYLOAD_BYTES,
) -> Envelope:
    sealer = None if store is None else store.sealer()
    return Envelope(identity, TOKENS, payload_bytes, "float32", sealer)


def block_keys(count: int, owner: Owner = ACME, seed: int = 0) -> list[BlockKey]:
    draw = random.Random(f"{owner} {seed}")
    links = [draw.randbytes(16) for _ in range(count + 1)]
    return [
        BlockKey(links[i + 1], links[i], draw.randbytes(4 * TOKENS), i * TOKENS, owner)
        for i in range(count)
    ]


def filled_slots(shape: Envelope, count: int, seed: int = 0) -> list[memoryview]:
    draw = random.Random(seed)
    return [
        memoryview(bytearray(shape.header_bytes) + bytearray(draw.randbytes(shape.payload_bytes)))
        for _ in range(count)
    ]


def buffers(shape: Envelope, count: int, fill: bytes = b"\xaa") -> list[memoryview]:
    return [memoryview(bytearray(fill * shape.payload_bytes)) for _ in range(count)]


def payloads(shape: Envelope, slots: Sequence[memoryview]) -> list[bytes]:
    return [bytes(slot[shape.header_bytes :]) for slot in slots]


@contextmanager
def running_store(
    url: str, *, timeout_s: float = 2.0, settle_s: float = 5.0, **options: Any
) -> Iterator[RedisStore]:
    options.setdefault("secret", SECRET)
    store = RedisStore(RedisOptions(url=url, timeout_s=timeout_s, **options))
    store.start()
    store.wait_settled(settle_s)
    try:
        yield store
    finally:
        store.close(5.0)


def probe(tier: RedisTier, keys: Sequence[BlockKey]) -> Probe:
    answer = ask(lambda done: tier.probe(keys, done))
    assert isinstance(answer, Probe)
    return answer


def fetch(
    tier: RedisTier,
    keys: Sequence[BlockKey],
    into: Sequence[memoryview],
    deadline_s: float = 5.0,
) -> Fetched:
    blocks = list(zip(keys, into, strict=True))
    answer = ask(lambda done: tier.fetch(blocks, deadline_s, done))
    assert isinstance(answer, Fetched)
    return answer


def save(
    tier: RedisTier, keys: Sequence[BlockKey], slots: Sequence[memoryview]
) -> tuple[bool, ...] | None:
    """Each block's fate, or None if the store was refused at once."""
    done = Once()
    if not tier.store(list(zip(keys, slots, strict=True)), done):
        assert done.calls == []
        return None
    fates = done.wait()
    assert isinstance(fates, tuple)
    return fates


def ask(start: Callable[[Once], None]) -> Any:
    done = Once()
    start(done)
    return done.wait()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that happens by itself."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen in time")
