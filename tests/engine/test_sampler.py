from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BadLogits
from engine.request import TokenLogprobs
from engine.sampling import candidates
from engine.sampling.sampler import Sampled, Sampler, SamplingRow
from engine.sampling_params import SamplingParams
from tests.engine.sampling_reference import choose

VOCAB = 1003
PROMPT = [5, 9, 9, 700, 31]


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=16, **changes)  # type: ignore[arg-type]  # test shorthand


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[Sampled | BadLogits]:
    """On a copy, as the sampler may change what it is given."""
    return Sampler().sample(logits.clone(), rows)


def tokens(outcomes: list[Sampled | BadLogits]) -> list[int]:
    assert all(isinstance(outcome, Sampled) for outcome in outcomes)
    return [outcome.token_id for outcome in outcomes if isinstance(outcome, Sampled)]


def random_logits(
    rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


MIXED = [
    params(temperature=0.0),
    params(temperature=0.0, logprobs=3),
    params(temperature=0.0, logit_bias={3: 30.0}),
    params(temperature=1.0, seed=1),
    params(temperature=0.3, seed=2, logprobs=0),
    params(temperature=1.5, seed=3, top_k=7),
    params(temperature=1.0, seed=4, top_p=0.5, logprobs=20),
    params(temperature=1.0, seed=5, top_p=0.999),
    params(temperature=5.0, seed=6, top_p=0.97),
    params(temperature=1.0, seed=7, min_p=0.1),
    params(temperature=0.8, seed=8, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    params(temperature=1.0, seed=9, frequency_penalty=1.5, presence_penalty=0.5, logprobs=2),
    params(temperature=2.0, seed=10, top_k=900, top_p=0.8, repetition_penalty=0.7),
    params(temperature=1.0, seed=11, choice_index=3, logit_bias={1: -100.0, 2: -np.inf, 4: 5.0}),
    params(temperature=1e-5, seed=12),
    params(temperature=1.0, seed=10, choice_index=1),
]
GENERATED = [[i, i, 700] for i in range(len(MIXED))]


def mixed_rows() -> list[SamplingRow]:
    return [
        SamplingRow(param, PROMPT, generated)
        for param, generated in zip(MIXED, GENERATED, strict=True)
    ]


@pytest.mark.parametrize("vocab", [1003, 1024, 4099])
def test_every_row_chooses_as_documented(vocab: int) -> None:
    for seed in range(4):
        logits = random_logits(len(MIXED), vocab, seed)
        expected = [
            choose(row.numpy(), param, PROMPT, generated)
            for row, param, generated in zip(logits, MIXED, GENERATED, strict=True)
        ]
        assert tokens(sample(logits, mixed_rows())) == expected


@pytest.mark.parametrize("vocab", [1003, 4099, 49157])
def test_a_row_alone_is_bitwise_the_row_in_a_batch(vocab: int) -> None:
    logits = random_logits(len(MIXED), vocab, seed=vocab)
    together = sample(logits, mixed_rows())
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(mixed_rows())]
    assert together == alone
    half = sample(logits[5:], mixed_rows()[5:])
    assert half == together[5:]


def test_sampling_keeps_to_one_thread_and_restores_the_rest() -> None:
    seen = []

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        if len(seen) == 2:
            raise RuntimeError("the argmax failed")
        return logits.argmax(1)

    before = torch.get_num_threads()
    rows = [SamplingRow(params(temperature=0.0), PROMPT)]
    try:
        torch.set_num_threads(3)
        Sampler(argmax).sample(random_logits(1), rows)
        with pytest.raises(RuntimeError, match="argmax failed"):
            Sampler(argmax).sample(random_logits(1), rows)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.one_of(
            st.floats(-30, 30, width=32),
            st.sampled_from([0.0, 1.0, 2.0, -2.0, -np.inf]),
        ),
        min_size=2,
        max_size=90,
    ).filter(lambda values: max(values) > -np.inf),
    temperature=st.sampled_from([1e-5, 0.2, 1.0, 1.7, 100.0]),
    top_k=st.integers(0, 100),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_filters_against_the_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    param = params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    values = torch.tensor([logits], dtype=torch.float32)
    expected = choose(values[0].numpy(), param, PROMPT, [])
    assert tokens(sample(values, [SamplingRow(param, PROMPT)])) == [expected]


@settings(max_examples=80, deadline=None)
@given(
    vocab=st.sampled_from([33, 500, 1500]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    coarse=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 16, 200]),
    top_p=st.sampled_from([0.3, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.001, 0.2]),
    seed=st.integers(0, 10_000),
)
def test_filters_that_work_together_on_larger_vocabularies(
    vocab: int,
    spread: float,
    coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
) -> None:
    logits = random_logits(3, vocab, seed, spread)
    if coarse:
        logits = logits.bfloat16().float()
    rows = [
        params(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        params(temperature=temperature, top_p=top_p, min_p=min_p, seed=seed),
        params(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    ]
    expected = [
        choose(row.numpy(), param, PROMPT, []) for row, param in zip(logits, rows, strict=True)
    ]
    assert tokens(sample(logits, [SamplingRow(row, PROMPT) for row in rows])) == expected


def test_a_nucleus_wider_than_expected_is_cut_exactly() -> None:
    logits = random_logits(4, 20_000, spread=0.2)
    rows = [params(top_p=0.97, seed=seed) for seed in range(3)] + [params(top_p=0.5, top_k=9000)]
    expected = [
        choose(row.numpy(), param, PROMPT, []) for row, param in zip(logits, rows, strict=True)
    ]
    assert tokens(sample(logits, [SamplingRow(row, PROMPT) for row in rows])) == expected


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_penalties_and_biases_against_the_reference(data: st.DataObject) -> None:
    vocab = 40
    token = st.integers(0, vocab - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=60))
    generated = data.draw(st.lists(token, max_size=150))
    param = params(
        temperature=data.draw(st.sampled_from([0.0, 1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, -2.0, 0.25, 2.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, -1.0, 2.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 0.5, 1.2])),
        logit_bias=data.draw(st.dictionaries(token, st.floats(-100, 100, width=32), max_size=5)),
        seed=data.draw(st.integers(0, 1000)),
    )
    logits = random_logits(1, vocab, seed=data.draw(st.integers(0, 99)))
    rebuilt = SamplingRow(param, prompt, generated)
    grown = SamplingRow(param, prompt)
    for generated_token in generated:
        grown.append(generated_token)
    expected = choose(logits[0].numpy(), param, prompt, generated)
    assert tokens(sample(logits.repeat(2, 1), [rebuilt, grown])) == [expected, expected]


def test_a_rebuilt_row_goes_on_where_the_old_one_was() -> None:
    steps = [random_logits(1, seed=step) for step in range(12)]
    for param in MIXED:
        row = SamplingRow(param, PROMPT)
        text: list[int] = []
        for step, logits in enumerate(steps):
            if step == 6:
                row = SamplingRow(param, PROMPT, text)
            text += tokens(sample(logits, [row]))
            row.append(text[-1])
        uninterrupted = SamplingRow(param, PROMPT)
        again: list[int] = []
        for logits in steps:
            again += tokens(sample(logits, [uninterrupted]))
            uninterrupted.append(again[-1])
        assert text == again
        assert row.position == len(PROMPT) + len(steps)


def test_draws_follow_the_distribution() -> None:
    logits = random_logits(1, 12, spread=1.0)
    count = 20_000
    rows = [SamplingRow(params(temperature=0.7, seed=seed), PROMPT) for seed in range(count)]
    chosen = tokens(sample(logits.expand(count, -1), rows))
    expected = torch.softmax(logits[0].double() / 0.7, dim=0).numpy() * count
    observed = np.bincount(chosen, minlength=12)
    # 11 degrees of freedom: the 99.99th percentile is 37.
    assert ((observed - expected) ** 2 / expected).sum() < 37


def test_choices_under_one_seed_differ() -> None:
    logits = random_logits(1, spread=0.1).expand(8, -1)
    rows = [SamplingRow(params(seed=1, choice_index=choice), PROMPT) for choice in range(8)]
    assert len(set(tokens(sample(logits, rows)))) == 8


def test_top_k_of_one_is_greedy() -> None:
    logits = random_logits(20)
    rows = [SamplingRow(params(top_k=1, temperature=2.0, seed=seed), PROMPT) for seed in range(20)]
    assert tokens(sample(logits, rows)) == logits.argmax(1).tolist()


def test_tiny_temperatures_are_greedy_and_finite() -> None:
    logits = random_logits(4)
    logits *= 1e4
    for temperature in (1e-5, 1e-30, 1e-300):
        for top_p in (1.0, 0.9):
            row = params(temperature=temperature, top_p=top_p)
            rows = [SamplingRow(row, PROMPT) for _ in range(4)]
            assert tokens(sample(logits, rows)) == logits.argmax(1).tolist()


def test_equal_logits_are_ranked_by_token_id() -> None:
    logits = torch.zeros(200, VOCAB)
    rows = [SamplingRow(params(top_k=5, seed=seed), PROMPT) for seed in range(200)]
    assert set(tokens(sample(logits, rows))) == {0, 1, 2, 3, 4}


def test_bans_hold_and_biases_force() -> None:
    logits = torch.zeros(1, 4)
    ban = params(seed=3, logit_bias={0: -np.inf, 1: -100.0, 3: -np.inf})
    force = params(seed=3, logit_bias={1: 100.0})
    for position in range(50):
        prompt = [0] * (position + 1)
        rows = [SamplingRow(ban, prompt), SamplingRow(force, prompt)]
        assert tokens(sample(logits.repeat(2, 1), rows)) == [2, 1]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_only_the_row_with_bad_logits_fails(poison: float) -> None:
    logits = random_logits(len(MIXED))
    healthy = sample(logits, mixed_rows())
    for index in (0, 5, 6, 9, 11):
        poisoned = logits.clone()
        poisoned[index, 77] = poison
        outcomes = sample(poisoned, mixed_rows())
        failed = outcomes.pop(index)
        assert isinstance(failed, BadLogits)
        assert failed.row == index
        assert "finite" in str(failed)
        assert outcomes == healthy[:index] + healthy[index + 1 :]


def test_only_the_row_without_tokens_fails() -> None:
    logits = random_logits(3, 4)
    banned = params(logit_bias=dict.fromkeys(range(4), -np.inf), top_p=0.9, logprobs=2)
    rows = [SamplingRow(params(seed=s), PROMPT[:1]) for s in range(3)]
    healthy = sample(logits, rows)
    rows[1] = SamplingRow(banned, [1])
    outcomes = sample(logits, rows)
    assert isinstance(outcomes[1], BadLogits)
    assert str(outcomes[1]) == "logit_bias leaves no token to choose"
    assert [outcomes[0], outcomes[2]] == [healthy[0], healthy[2]]


@pytest.mark.parametrize("token", [-1, 4])
def test_only_the_row_with_an_unknown_biased_token_fails(token: int) -> None:
    logits = random_logits(2, 4)
    rows = [SamplingRow(params(seed=1), [0]), SamplingRow(params(logit_bias={token: 1.0}), [0])]
    good, bad = sample(logits, rows)
    assert isinstance(good, Sampled)
    assert isinstance(bad, BadLogits)
    assert str(bad) == f"logit_bias: token {token} is not below 4"


def test_plain_greedy_uses_the_argmax_it_was_given_and_leaves_logits_alone() -> None:
    calls = []

    def argmax(logits: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(logits.shape))
        return logits.argmax(1)

    logits = random_logits(3)
    before = logits.clone()
    rows = [SamplingRow(params(temperature=0.0), PROMPT) for _ in range(3)]
    outcomes = Sampler(argmax).sample(logits, rows)
    assert outcomes == [Sampled(token, None) for token in before.argmax(1).tolist()]
    assert calls == [(3, VOCAB)]
    assert torch.equal(logits, before)


def test_no_rows_no_outcomes() -> None:
    assert Sampler().sample(torch.zeros(0, 4), []) == []


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2)
    param = params(
        temperature=0.5, logprobs=3, logit_bias={8: 90.0}, repetition_penalty=1.4, top_k=1
    )
    rows = [SamplingRow(param, PROMPT, [1, 1]), SamplingRow(param, PROMPT, [1, 1])]
    reference = torch.log_softmax(logits.double(), dim=1)
    for outcome, row in zip(sample(logits, rows), reference, strict=True):
        assert isinstance(outcome, Sampled)
        report = outcome.logprobs
        assert isinstance(report, TokenLogprobs)
        assert report.token_id == outcome.token_id == 8
        assert report.logprob == pytest.approx(row[8].item(), abs=1e-5)
        best = row.topk(3)
        assert [token for token, _ in report.top] == best.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logits_of_an_inference_mode_forward_are_accepted() -> None:
    with torch.inference_mode():
        logits = random_logits(len(MIXED)) * 1.0
    assert sample(logits, mixed_rows()) == Sampler().sample(logits, mixed_rows())


def test_the_accelerator_path_chooses_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(len(MIXED), 4099)
    expected = sample(logits, mixed_rows())
    monkeypatch.setattr(candidates, "_at_least_cpu", candidates._at_least_device)
    assert sample(logits, mixed_rows()) == expected
