"""A request that another engine began goes on as if it had never been interrupted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from engine.engine import Engine, EngineOptions
from engine.request import EngineRequest, FinishReason
from tests.engine.harness import Outcome, request, run_all
from tests.engine.mock_executor import VOCAB as MOCK_VOCAB
from tests.engine.mock_executor import MockExecutor, expected_text
from tests.engine.tiered_engines import MAX_CONTEXT, Recorder, open_executor, tokens

ANSWER = 12
PARAMS: dict[str, dict[str, object]] = {
    "greedy": {},
    "logprobs": {"logprobs": 2},
    "seeded": {
        "temperature": 1.1,
        "top_p": 0.95,
        "seed": 11,
        "choice_index": 2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "logit_bias": {3: -2.0},
        "logprobs": 1,
    },
}


class Running:
    """An engine and everything that came out of it."""

    def __init__(self, executor, eos: frozenset[int] = frozenset(), **options: int) -> None:
        settings = {"max_context": MAX_CONTEXT, "max_running": 6, "step_tokens": 64, **options}
        self.out = Recorder()
        self.engine = Engine(executor, eos, EngineOptions(**settings), self.out)
        self.engine.start()

    def run(self, *requests: EngineRequest) -> list[Outcome]:
        run_all(self.engine, self.out, list(requests))
        return [self.out.outcomes[each.request_id] for each in requests]


@pytest.fixture
def running():
    """Starts engines, and closes them all."""
    opened: list[Running] = []

    def start(executor, eos: frozenset[int] = frozenset(), **options: int) -> Running:
        opened.append(Running(executor, eos, **options))
        return opened[-1]

    yield start
    for each in opened:
        each.engine.close()


def cut(each: EngineRequest, whole: Outcome, at: int) -> EngineRequest:
    """The rest of a request, of which `at` tokens were generated elsewhere."""
    return replace(
        each,
        request_id=f"{each.request_id} from {at}",
        generated_token_ids=tuple(whole.token_ids[:at]),
    )


def check_rest(whole: Outcome, rest: Outcome, at: int, kind: str) -> None:
    assert (rest.finish, rest.error) == (whole.finish, None)
    assert rest.token_ids == whole.token_ids[at:]
    assert len(rest.logprobs) == len(whole.logprobs[at:])
    for told, expected in zip(rest.logprobs, whole.logprobs[at:], strict=True):
        if kind == "native":  # a row's result does not depend on what else is in the step
            assert told == expected
        else:
            assert told.token_id == expected.token_id
            assert told.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("kind", ["native", "torch"])
def test_cut_anywhere_it_goes_on_with_the_same_tokens(kind, params, running):
    first, second = running(open_executor(kind, 48)), running(open_executor(kind, 48))
    for length in (15, 40):
        each = request(f"{length}", tokens(("resume", length), length), ANSWER, **params)
        whole = first.run(each)[0]
        # nothing is cached for these; the others find more and more of what went before
        cold = [cut(replace(each, chain_root=None), whole, at) for at in (1, 5, ANSWER - 1)]
        warm = [replace(cut(each, whole, at), request_id=f"{length} warm {at}") for at in range(12)]
        for rest in [*cold, *warm]:
            outcome = second.run(rest)[0]
            check_rest(whole, outcome, len(rest.generated_token_ids), kind)
            assert (outcome.cached_tokens > 0) == (rest in warm[1:])
        second.engine.check_integrity()


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_preempted_after_it_was_resumed_it_still_goes_on(kind, running):
    asked = [
        request(f"r{i}", tokens(("many", i), 20 + 5 * i), 60, **PARAMS["seeded"]) for i in range(5)
    ]
    wholes = running(open_executor(kind, 48)).run(*asked)
    # one sequence of the longest context, or a few short ones
    crowded = running(open_executor(kind, 18), max_running=5)
    rests = crowded.run(*(cut(each, wholes[i], 3 + 11 * i) for i, each in enumerate(asked)))
    assert crowded.engine.stats().preemptions > 0
    for i, rest in enumerate(rests):
        check_rest(wholes[i], rest, 3 + 11 * i, kind)
    crowded.engine.check_integrity()


def test_what_another_engine_generated_is_taken_from_the_cache_too(running):
    prompt = [token % MOCK_VOCAB for token in tokens("mock", 40)]
    text = expected_text(prompt, 60)
    each = running(MockExecutor(64), max_context=256)
    each.run(request("whole", prompt, 60))
    rest = replace(request("rest", prompt, 60), generated_token_ids=tuple(text[:50]))
    assert each.run(rest)[0].token_ids == text[50:]
    use = each.out.uses["rest"]
    assert use.cached_tokens == each.out.outcomes["rest"].cached_tokens == 40  # all of the prompt
    assert sum(run.blocks for run in use.runs) == 3
    reports = [report for report in each.out.reports if "rest" in ids(report.outputs)]
    assert reports[0].tokens == 1, "the prompt and what was generated lay in the cache"


def ids(outputs: Iterable) -> list[str]:
    return [output.request_id for output in outputs]


def test_the_first_output_of_a_run_tells_of_the_cache_and_no_other_one(running):
    prompt = [1, 2, 3] * 7
    text = expected_text(prompt, 6)
    each = running(MockExecutor(64), max_context=256)
    rest = replace(request("rest", prompt, 6, prompt_logprobs=1), generated_token_ids=(text[0],))
    outcome = each.run(rest)[0]
    assert outcome.token_ids == text[1:]
    assert outcome.prompt_logprobs is None, "they went out with the first token of all"
    outputs = [output for report in each.out.reports for output in report.outputs]
    assert [output.cache_use is not None for output in outputs] == [True] + [False] * 4


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ((4, 5, 6), {}, "3 of max_tokens 3 are generated already"),
        ((4, 5, 6, 7), {}, "4 of max_tokens 3"),
        ((4, 96), {"ignore_eos": False}, "end with a stop token"),
        ((4, 5), {"stop_token_ids": frozenset({5})}, "end with a stop token"),
    ],
)
def test_what_has_ended_already_is_refused(running, given, settings, message):
    each = running(MockExecutor(64), frozenset({96}), max_context=256)
    ended = replace(request("x", [1, 2], 3, **settings), generated_token_ids=given)
    outcome = each.run(ended)[0]
    assert outcome.finish is FinishReason.ERROR
    assert message in (outcome.error or "")
    assert each.engine.stats().waiting == 0


def test_max_tokens_counts_what_was_generated_before(running):
    each = running(MockExecutor(64), max_context=256)
    prompt = [5] * 200
    text = expected_text(prompt, 56)
    rest = replace(request("fits", prompt, 56), generated_token_ids=tuple(text[:30]))
    assert each.run(rest)[0].token_ids == text[30:]
    outcome = each.run(replace(rest, request_id="x", params=replace(rest.params, max_tokens=57)))[0]
    assert "257 of 256" in (outcome.error or "")
