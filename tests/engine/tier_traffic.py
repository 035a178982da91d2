"""What goes into an engine over its tiers, and what has to come out."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, replace

import pytest

from engine.engine import Engine, EngineOptions
from engine.request import EngineRequest, FinishReason
from tests.engine.harness import Collector, Outcome
from tests.engine.tiered_engines import (
    MAX_CONTEXT,
    MAX_RUNNING,
    STEP_TOKENS,
    TENANTS,
    Stage,
    ask,
    open_executor,
    tokens,
)


class ColdRuns:
    """What requests say when each runs alone on an engine that has never seen anything."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, int, int], tuple[Engine, Collector]] = {}
        self._known: dict[tuple[object, ...], Outcome] = {}

    def of(self, each: EngineRequest, kind: str, block_tokens: int = 16, model: int = 0) -> Outcome:
        where = (kind, block_tokens, model)
        what = (where, tuple(each.prompt_token_ids), repr(each.params))
        if what not in self._known:
            engine, out = self._engine(*where)
            name = f"cold {len(self._known)}"
            engine.submit(
                replace(each, request_id=name, chain_root=None, shared=None, retention=())
            )
            out.wait([name])
            assert out.outcomes[name].cached_tokens == 0
            self._known[what] = out.outcomes[name]
        return self._known[what]

    def check(self, stage: Stage, kind: str, block_tokens: int = 16, model: int = 0) -> None:
        """Everything that came out of the stage is what it would have been alone: all of it, or
        the beginning where it was aborted."""
        for name, each in stage.asked.items():
            got, cold = stage.out.outcomes[name], self.of(each, kind, block_tokens, model)
            count = len(got.token_ids)
            if got.finish is not FinishReason.ABORT:
                assert (got.finish, got.error) == (cold.finish, None), (name, got.error)
                assert count == len(cold.token_ids), name
            assert got.token_ids == cold.token_ids[:count], name
            assert got.finish is FinishReason.ABORT or (got.prompt_logprobs is None) == (
                cold.prompt_logprobs is None
            )
            pairs = list(zip(got.logprobs, cold.logprobs, strict=False))
            if got.prompt_logprobs is not None and cold.prompt_logprobs is not None:
                pairs += zip(got.prompt_logprobs, cold.prompt_logprobs, strict=True)
            for warm, expected in pairs:
                if kind == "native":  # its rows do not depend on what else is in the step
                    assert warm == expected, name
                else:
                    assert warm.logprob == pytest.approx(expected.logprob, abs=1e-4), name

    def close(self) -> None:
        for engine, _ in self._engines.values():
            engine.close()

    def _engine(self, kind: str, block_tokens: int, model: int) -> tuple[Engine, Collector]:
        where = (kind, block_tokens, model)
        if where not in self._engines:
            out = Collector()
            engine = Engine(
                open_executor(kind, 48, block_tokens, model),
                frozenset(),
                EngineOptions(MAX_CONTEXT, MAX_RUNNING, STEP_TOKENS, prompt_logprob_tokens=32),
                out,
            )
            engine.start()
            self._engines[where] = (engine, out)
        return self._engines[where]


@dataclass
class Traffic:
    """Random requests of three tenants, made of few parts, so that they share prefixes of many
    lengths; a part of them is aborted."""

    seed: int
    block_tokens: int
    abort_share: float = 0.3
    most_tokens: int = 12

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        edge = self.block_tokens
        lengths = [edge - 1, edge, edge + 1, 2 * edge, 2 * edge + 3, 3 * edge]
        self._parts = [tokens((self.seed, index), draw.choice(lengths)) for index in range(7)]
        self._shared = tokens((self.seed, "shared"), 32)
        self._count = 0

    def next(self) -> EngineRequest:
        draw, edge = self.draw, self.block_tokens
        self._count += 1
        prompt: list[int] = []
        shared_tokens = 0
        if draw.random() < 0.3:
            prompt += self._shared
            shared_tokens = len(self._shared)
        for _ in range(draw.randint(1, 4)):
            prompt += draw.choice(self._parts)
        if draw.random() < 0.4:
            prompt = prompt[: max(1, len(prompt) // edge * edge + draw.choice([-1, 0, 1]))]
        prompt = prompt[: MAX_CONTEXT - self.most_tokens - edge] or [1]
        shared_tokens = shared_tokens if len(prompt) >= shared_tokens else 0
        params: dict[str, object] = {}
        if draw.random() < 0.15:
            params["prompt_logprobs"] = draw.choice([0, 2])
        if draw.random() < 0.3:
            params |= {"temperature": 0.8, "seed": draw.randrange(1000)}
        tenant = draw.choice(TENANTS)
        plain = ask(
            f"{self.seed}-{self._count}",
            prompt,
            draw.randint(1, self.most_tokens),
            tenant=tenant,
            user=draw.choice([None, "u", "v"]) if tenant == TENANTS[2] else None,
            shared_tokens=shared_tokens,
            priority=draw.choice([0, 0, 1]),
            **params,
        )
        terms = random.Random(f"{self.seed} {self._count}")
        return replace(
            plain,
            flow=tenant.encode(),
            weight=terms.choice([0.5, 1.0, 3.0]),
            deadline_s=terms.choice([None, time.monotonic() + terms.random()]),
            tpot_s=terms.choice([None, None, 1e-4, 0.01]),
        )

    def send(self, stage: Stage, count: int, threads: int = 4, pause_s: float = 0.004) -> None:
        """Submit from several threads at random times, abort some, wait for all."""
        plans: list[list[tuple[EngineRequest, float, int | None]]] = [[] for _ in range(threads)]
        names = []
        for index in range(count):
            each = self.next()
            stage.asked[each.request_id] = each
            names.append(each.request_id)
            abort_at = None
            if self.draw.random() < self.abort_share:
                abort_at = self.draw.choice([0, 0, 1, 3])
            plans[index % threads].append((each, self.draw.random() * pause_s, abort_at))
        failures: list[Exception] = []

        def client(plan: list[tuple[EngineRequest, float, int | None]]) -> None:
            try:
                for each, wait_s, abort_at in plan:
                    time.sleep(wait_s)
                    stage.engine.submit(each)
                    if abort_at is None:
                        continue
                    if abort_at == 0:
                        time.sleep(wait_s / 2)
                    else:
                        stage.out.wait_tokens(
                            each.request_id, min(abort_at, each.params.max_tokens)
                        )
                    stage.engine.abort(each.request_id)
            except Exception as failure:  # noqa: BLE001 - raised below, on the test's thread
                failures.append(failure)

        clients = [threading.Thread(target=client, args=(plan,)) for plan in plans]
        for each in clients:
            each.start()
        for each in clients:
            each.join()
        assert not failures, failures
        stage.out.wait(names)
