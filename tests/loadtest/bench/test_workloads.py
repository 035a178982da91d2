"""Prompts: the same for the same seed, and exactly as shared as the workload says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.bench.workloads import STANDARD, W1, W3, W4, Workload
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary


@pytest.mark.parametrize("workload", STANDARD.values(), ids=STANDARD)
def test_a_workload_is_what_it_says(workload: Workload) -> None:
    sends = workload.sends(0, DEFAULT_VOCABULARY)

    assert len(sends) == workload.prompts * len(workload.passes)
    assert {len(send.prompt) for send in sends} == {workload.prompt_tokens}
    ids = [token for send in sends for token in send.prompt]
    assert min(ids) >= DEFAULT_VOCABULARY.first
    assert max(ids) < DEFAULT_VOCABULARY.end


@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_w3_shares_1024_tokens_and_not_one_more(seed: int) -> None:
    prompts = [send.prompt for send in W3.sends(seed, DEFAULT_VOCABULARY)]

    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert len({prompt[1024:1040] for prompt in prompts}) == len(prompts)


@given(seed=st.integers(0, 2**32), workload=st.sampled_from(sorted(STANDARD)))
@settings(max_examples=10, deadline=None)
def test_another_seed_shares_no_block(seed: int, workload: str) -> None:
    one, other = (
        {send.prompt[:16] for send in STANDARD[workload].sends(number, DEFAULT_VOCABULARY)}
        for number in (seed, seed + 1)
    )

    assert not one & other


def test_prompts_are_the_same_in_another_process() -> None:
    program = (
        "from loadtest.bench.workloads import W1;"
        "from loadtest.vocabulary import DEFAULT_VOCABULARY;"
        "import sys; sys.stdout.write(str(W1.sends(7, DEFAULT_VOCABULARY)[0].prompt))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert printed == str(W1.sends(7, DEFAULT_VOCABULARY)[0].prompt)


def test_w4_sends_every_prompt_cold_and_then_again() -> None:
    sends = W4.sends(0, DEFAULT_VOCABULARY)

    assert [send.pass_name for send in sends] == ["cold", "hit"] * W4.prompts
    assert [send.prompt for send in sends[::2]] == [send.prompt for send in sends[1::2]]
    assert len({send.prompt for send in sends}) == W4.prompts


def test_a_small_vocabulary_is_kept_to() -> None:
    ids = {token for send in W1.sends(0, Vocabulary(3, 11)) for token in send.prompt}

    assert ids == set(range(3, 11))


def test_passes_at_a_concurrency_are_refused() -> None:
    with pytest.raises(ValueError, match="several passes need a concurrency of 1"):
        Workload("W9", "", 2, 1, 0, 16, 1, ("cold", "hit"))
