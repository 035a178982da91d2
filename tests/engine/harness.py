"""Drives an engine from a test: submit, wait, collect."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.engine import Engine
from engine.report import StepReport
from engine.request import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from engine.sampling_params import SamplingParams

ROOT = b"r" * 16


@dataclass
class Outcome:
    """Everything that came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: str | None = None


class Collector:
    """A sink that keeps outcomes and lets a test wait for them."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self.reports: list[StepReport] = []
        self._changed = threading.Condition()

    def __call__(self, report: StepReport) -> None:
        with self._changed:
            self.reports.append(report)
            for output in report.outputs:
                self._take(output)
            self._changed.notify_all()

    def _take(self, output: EngineOutput) -> None:
        outcome = self.outcomes[output.request_id]
        assert outcome.finish is None, "output after the end"
        outcome.token_ids += output.token_ids
        outcome.logprobs += output.logprobs
        outcome.cached_tokens = output.cached_tokens
        outcome.finish, outcome.error = output.finish_reason, output.error
        outcome.prompt_logprobs = output.prompt_logprobs or outcome.prompt_logprobs

    def wait(self, ids: Iterable[str], timeout_s: float = 60.0) -> None:
        """Until every id has finished; AssertionError when time is up."""
        wanted = list(ids)
        with self._changed:
            done = self._changed.wait_for(
                lambda: all(self.outcomes[i].finish for i in wanted), timeout=timeout_s
            )
        assert done, f"unfinished: {[i for i in wanted if not self.outcomes[i].finish]}"

    def wait_tokens(self, request_id: str, count: int, timeout_s: float = 60.0) -> None:
        """Until a request has at least `count` tokens."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: len(self.outcomes[request_id].token_ids) >= count, timeout=timeout_s
            )


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    root: bytes | None = ROOT,
    priority: int = 0,
    **params: object,
) -> EngineRequest:
    """A greedy request unless `params` say otherwise."""
    settings = {"temperature": 0.0, "ignore_eos": True, **params}
    return EngineRequest(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **settings),  # type: ignore[arg-type]
        chain_root=root,
        priority=priority,
        read_cache=params.get("prompt_logprobs") is None,
    )


def run_all(engine: Engine, collector: Collector, requests: list[EngineRequest]) -> None:
    """Submit all at once and wait for all."""
    for each in requests:
        engine.submit(each)
    collector.wait([each.request_id for each in requests])
