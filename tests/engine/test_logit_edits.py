from __future__ import annotations

import numpy as np
import torch

from engine.sampling.logit_edits import LogitEdits, apply_edits
from engine.sampling_params import SamplingParams


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=16, **changes)  # type: ignore[arg-type]  # test shorthand


def test_needed_only_if_something_changes() -> None:
    assert not LogitEdits.needed(params(temperature=0.3, top_p=0.4))
    assert LogitEdits.needed(params(logit_bias={1: 1.0}))
    assert LogitEdits.needed(params(frequency_penalty=0.1))
    assert LogitEdits.needed(params(presence_penalty=-0.1))
    assert LogitEdits.needed(params(repetition_penalty=1.1))


def test_each_penalty_reads_what_it_should() -> None:
    """The prompt is [0, 1], the output [1, 2, 2]; token 3 was never seen."""
    cases = {
        "frequency": (params(frequency_penalty=0.5), [2.0, 1.5, -3.0, 2.0]),
        "presence": (params(presence_penalty=0.5), [2.0, 1.5, -2.5, 2.0]),
        "repetition": (params(repetition_penalty=2.0), [1.0, 1.0, -4.0, 2.0]),
        "bias first": (
            params(repetition_penalty=2.0, logit_bias={0: -4.0, 3: 1.0}),
            [-4.0, 1.0, -4.0, 3.0],
        ),
        "all": (
            params(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0),
            [1.0, 0.25, -5.25, 2.0],
        ),
    }
    logits = torch.tensor([[2.0, 2.0, -2.0, 2.0]]).repeat(len(cases), 1)
    edits = [LogitEdits(param, [0, 1], [1, 2, 2]) for param, _ in cases.values()]
    apply_edits(logits, range(len(cases)), edits)
    for row, (name, (_, expected)) in zip(logits.tolist(), cases.items(), strict=True):
        assert row == expected, name


def test_other_rows_are_left_alone() -> None:
    logits = torch.ones(4, 6)
    edits = [LogitEdits(params(logit_bias={5: 1.0}), [], ()) for _ in range(2)]
    apply_edits(logits, [3, 1], edits)
    assert logits[:, 5].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert bool((logits[:, :5] == 1.0).all())


def test_appending_equals_rebuilding() -> None:
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 500, 300).tolist()
    generated = generator.integers(0, 500, 400).tolist()
    param = params(frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={7: 2.0})
    grown = LogitEdits(param, prompt, ())
    for token in generated:
        grown.append(token)
    rebuilt = LogitEdits(param, prompt, generated)
    for name in ("token_ids", "biases", "counts", "repetition_factors"):
        assert np.array_equal(getattr(grown, name), getattr(rebuilt, name)), name


def test_a_bias_alone_ignores_the_tokens() -> None:
    edits = LogitEdits(params(logit_bias={7: 2.0}), [1, 2, 3], [4, 5])
    assert edits.token_ids.tolist() == [7]
