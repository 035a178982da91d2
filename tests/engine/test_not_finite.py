"""A model whose numbers fail for one request fails for no other one."""

from __future__ import annotations

import math

import pytest
import torch

from cache.block import Tier
from tests.engine.native_models import VOCAB, Sequence, make_step, random_ids
from tests.engine.tiered_engines import ask, open_executor, running_stage, tokens

PROMPT = tokens("prompt", 100)


class Failing:
    """An executor whose steps with a token id write NaN as KV, and whose logits are NaN then."""

    def __init__(self, real):
        self._real = real
        self.fails_at = None

    def __getattr__(self, name):
        return getattr(self._real, name)

    def forward(self, batch):
        logits = self._real.forward(batch)
        return self._spoil(batch, logits) if self.fails_at in batch.token_ids else logits

    def start(self, batch):
        return self.forward(batch)

    def _spoil(self, batch, logits):
        numbers = self._real.pages.view(torch.float32)
        for sequence, length in enumerate(batch.context_lengths.tolist()):
            numbers[batch.block_tables[sequence, (length - 1) // 16]] = torch.nan
        return torch.full_like(logits, torch.nan)


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_what_a_page_held_before_does_not_show(kind):
    with running_stage(kind, blocks=24) as stage:
        clean = [ask(f"clean {length}", PROMPT[:length], 40) for length in (3, 40, 100)]
        stage.run(clean)

        def leave_nan():
            stage.cache.device.clear()
            stage.cache.clear_dram()
            stage.executor.pages.view(torch.float32).fill_(torch.nan)

        stage.wait_quiet()
        stage.engine.call(leave_nan)
        stage.run(ask(f"later {length}", PROMPT[:length], 40) for length in (3, 40, 100))
        for length in (3, 40, 100):
            was, now = (stage.out.outcomes[f"{when} {length}"] for when in ("clean", "later"))
            assert now.error is None
            assert now.token_ids == was.token_ids


def test_pages_of_others_do_not_show_where_a_table_is_shorter_than_the_longest():
    executor = open_executor("torch", 48)
    short = Sequence(random_ids(6, 1), [1], computed=5)
    alone = Sequence(random_ids(6, 1), [1])
    executor.forward(make_step([(alone, 5)]))
    expected = executor.forward(make_step([(alone, 1)])).clone()
    long = Sequence(random_ids(80, 2), [2, 3, 4, 5, 6], computed=79)
    executor.pages[0].view(torch.float32).fill_(torch.nan)  # what unused entries point to
    batch = make_step([(short, 1), (long, 1)])
    before = batch.block_tables.copy()
    assert torch.allclose(executor.forward(batch)[0], expected[0], atol=1e-5)
    assert (batch.block_tables == before).all()


@pytest.mark.parametrize("shared_tokens", [0, 32])
def test_no_block_of_a_prompt_that_led_to_bad_logits_is_kept(shared_tokens):
    """Whatever was computed of it in the steps before; but what is everybody's stays."""
    prompt = [*(token % 80 for token in tokens("long", 8 * 16 - 1)), 82]
    with running_stage("torch", wrap=Failing) as stage:
        stage.executor.fails_at = 82
        stage.run([ask("bad", prompt, shared_tokens=shared_tokens)])
        assert stage.out.outcomes["bad"].error == "the model's logits are not finite"
        assert stage.tier(Tier.DEVICE).cached == shared_tokens // 16
        stage.executor.fails_at = None
        use = stage.run_one(ask("good", prompt, shared_tokens=shared_tokens))
        assert use.cached_tokens == shared_tokens
        assert stage.out.outcomes["good"].error is None
        stage.engine.check_integrity()


def test_a_prompt_whose_bias_leaves_no_token_keeps_its_blocks():
    prompt = tokens("long", 8 * 16)
    with running_stage("torch") as stage:
        stage.run([ask("bad", prompt, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))])
        assert stage.out.outcomes["bad"].error == "logit_bias leaves no token to choose"
        assert stage.run_one(ask("good", prompt)).cached_tokens >= 4 * 16
        stage.engine.check_integrity()
