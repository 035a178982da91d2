"""The native executor against the torch one: same numbers, whatever the shape of the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.decoder import build_program
from engine.executors.native import NativeExecutor, NativeUnavailable, native_bytes_per_block
from engine.executors.native_build import find_compiler
from tests.engine.native_models import (
    ARCHITECTURES,
    BLOCKS,
    VOCAB,
    Sequence,
    architecture,
    make_step,
    open_native,
    open_reference,
    random_ids,
    random_weights,
    run_alone,
)

try:
    find_compiler()
except NativeUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ISAS = ["portable", "avx512bf16", "amx"]
SHUFFLED = [7, 3, 11, 2, 30, 14, 9, 21, 5, 17, 33, 1, 28, 40]


@pytest.fixture(params=["float32", *ISAS])
def kind(request, monkeypatch):
    """A dtype and, at bfloat16, an instruction set that this machine has."""
    if request.param == "float32":
        return torch.float32
    monkeypatch.setenv("FOREBAY_NATIVE_ISA", request.param)
    try:
        open_native(architecture(), torch.bfloat16).close()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return torch.bfloat16


@pytest.fixture(scope="module")
def expected():
    """Reference logits by architecture name, computed when first asked for."""
    known: dict[str, torch.Tensor] = {}

    def logits(name: str) -> torch.Tensor:
        if name not in known:
            executor = open_reference(ARCHITECTURES[name])
            known[name] = run_alone(executor, random_ids(150, 1), [150], SHUFFLED)
        return known[name]

    return logits


def assert_near(logits: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
    else:
        # 8 bits of mantissa, a few roundings per layer: a percent of the spread, rarely several
        error = (logits - reference).abs()
        assert error.mean() < 0.015 * reference.std()
        assert error.max() < 0.12 * reference.std()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(name, kind, expected):
    executor = open_native(ARCHITECTURES[name], kind)
    try:
        logits = run_alone(executor, random_ids(150, 1), [150], SHUFFLED)
        assert_near(logits, expected(name), kind)
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["grouped", "gemma_like", "multi_query", "wide_mlp"])
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_chunks_give_the_same_bits(name, kind, block_tokens):
    ids = random_ids(150, 2)
    executor = open_native(ARCHITECTURES[name], kind, block_tokens=block_tokens)
    try:
        whole = run_alone(executor, ids, [150], SHUFFLED)
        for chunks in ([7] * 21 + [3], [16] * 9 + [6], [33, 64, 1, 1, 1, 50], [1] * 150):
            assert torch.equal(run_alone(executor, ids, chunks, SHUFFLED[::-1]), whole)
    finally:
        executor.close()


@pytest.mark.parametrize("name", ["grouped", "multi_head", "gemma_like", "head_dim_64"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_gives_the_same_bits(name, kind, threads):
    """Sixteen sequences of different lengths, some sharing pages, decoding beside a prefill."""
    executor = open_native(ARCHITECTURES[name], kind, threads=threads, blocks=160)
    apart = open_native(ARCHITECTURES[name], kind, share_prefixes=False)
    try:
        shared_ids = random_ids(130, 3)
        owner = Sequence(shared_ids, list(range(9)))
        executor.forward(make_step([(owner, 130)]))
        free = iter(range(9, 160))
        sequences = []
        for n in range(16):
            shared_blocks = (0, 4, 8)[n % 3]
            own = random_ids(20 + 3 * n, 10 + n)
            ids = np.concatenate([shared_ids[: shared_blocks * 16], own])
            pages = list(range(shared_blocks))
            pages += [next(free) for _ in range(-(-len(ids) // 16) - shared_blocks)]
            sequences.append(Sequence(ids, pages, shared_blocks * 16))
        prefill = Sequence(random_ids(70, 99), [next(free) for _ in range(5)])
        together: list[list[torch.Tensor]] = [[] for _ in sequences]
        alone = [run_alone(apart, s.ids, [len(s.ids)], SHUFFLED) for s in sequences]
        first = [(s, len(s.ids) - s.computed - 8) for s in sequences]
        for n, rows in enumerate(_rows(executor, first)):
            together[n].append(rows)
        for step in range(8):
            parts = [(s, 1) for s in sequences]
            parts.insert(step, (prefill, 8))
            outputs = _rows(executor, parts)
            outputs.pop(step)
            for n, rows in enumerate(outputs):
                together[n].append(rows)
        for n in range(16):
            start = (0, 4, 8)[n % 3] * 16
            assert torch.equal(torch.cat(together[n]), alone[n][start:]), n
    finally:
        executor.close()
        apart.close()


def _rows(executor: NativeExecutor, parts: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
    logits = executor.forward(make_step(parts)).clone()
    return list(torch.split(logits, [count for _, count in parts]))


def test_old_contents_do_not_show(kind):
    """Pages come back with whatever finite numbers their last holder left."""
    arch = ARCHITECTURES["gemma_like"]
    ids = random_ids(150, 4)
    executor = open_native(arch, kind)
    try:
        clean = run_alone(executor, ids, [150], SHUFFLED)
        width = executor.pages.shape[1] // kind.itemsize
        filler = torch.linspace(-3e4, 3e4, BLOCKS * width).to(kind).view(BLOCKS, width)
        executor.pages.view(kind).copy_(_keep_padding(filler, executor, arch))
        assert torch.equal(run_alone(executor, ids, [100, 1, 49], SHUFFLED), clean)
    finally:
        executor.close()


def _keep_padding(filler, executor, arch):
    """Zeros where a padded head_dim has no numbers: no holder ever writes there."""
    per_word = 4 // executor.dtype.itemsize
    multiple = 32 if per_word == 2 else 16
    padded = -(-arch.head_dim // multiple) * multiple
    groups = filler.view(BLOCKS, len(arch.layers), arch.kv_heads, -1, 2, padded * 16)
    keys = groups[..., 0, :].unflatten(-1, (padded // per_word, -1))
    keys[..., arch.head_dim // per_word :, :] = 0
    values = groups[..., 1, :].unflatten(-1, (-1, padded, per_word))
    values[..., arch.head_dim :, :] = 0
    return filler


def test_many_steps_of_changing_shape(kind):
    """Random mixtures, checked against each sequence computed at once."""
    generator = np.random.default_rng(5)
    arch = ARCHITECTURES["window"]
    executor = open_native(arch, kind, blocks=96)
    try:
        lengths = generator.integers(20, 150, 9)
        sequences, whole = [], []
        for n, length in enumerate(lengths):
            sequences.append(Sequence(random_ids(length, n), list(range(n * 10, n * 10 + 10))))
            whole.append(run_alone(executor, sequences[-1].ids, [length], SHUFFLED))
        while any(s.computed < len(s.ids) for s in sequences):
            waiting = [n for n, s in enumerate(sequences) if s.computed < len(s.ids)]
            chosen = generator.permutation(waiting)[: generator.integers(1, 9)]
            parts = []
            for n in chosen:
                left = len(sequences[n].ids) - sequences[n].computed
                parts.append((sequences[n], int(min(left, generator.choice([1, 1, 2, 5, 40])))))
            starts = [sequences[n].computed for n in chosen]
            for n, start, rows in zip(chosen, starts, _rows(executor, parts), strict=True):
                assert torch.equal(rows, whole[n][start : start + len(rows)])
    finally:
        executor.close()


def test_logits_only_where_asked():
    executor = open_native(architecture())
    try:
        a, b = Sequence(random_ids(40, 6), [0, 1, 2]), Sequence(random_ids(30, 7), [3, 4])
        every = executor.forward(make_step([(a, 40), (b, 30)])).clone()
        a.computed = b.computed = 0
        last = executor.forward(make_step([(a, 40), (b, 30)], every_row=False))
        assert torch.equal(last, every[[39, 69]])
        a.computed = b.computed = 0
        batch = make_step([(a, 40), (b, 30)])
        batch.logit_rows = np.zeros(0, dtype=np.int32)
        assert executor.forward(batch).shape == (0, VOCAB)
    finally:
        executor.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_ids": [0, VOCAB, 1]}, f"token id {VOCAB}"),
        ({"token_ids": [0, -1, 1]}, "token id -1"),
        ({"block_tables": [[BLOCKS]]}, f"block {BLOCKS} of {BLOCKS}"),
        ({"positions": [0, 1, 3]}, "positions"),
        ({"logit_rows": [3]}, "logit row 3"),
        ({"logit_rows": [1, 1]}, "ascend"),
        ({"query_starts": [0, 2]}, "query_starts"),
        ({"context_lengths": [20], "positions": [17, 18, 19]}, "block table is shorter"),
    ],
)
def test_wrong_steps_are_refused(change, words):
    executor = open_native(architecture())
    try:
        batch = make_step([(Sequence(random_ids(3, 8), [1]), 3)])
        for field, value in change.items():
            setattr(batch, field, np.asarray(value, dtype=np.int32))
        with pytest.raises(ValueError, match=words):
            executor.forward(batch)
        right = make_step([(Sequence(random_ids(3, 8), [1]), 3)])
        assert executor.forward(right).isfinite().all()
    finally:
        executor.close()


def test_weights_are_taken_unless_refused():
    arch = architecture(tied_embeddings=False)
    weights = random_weights(arch)
    with pytest.raises(NativeUnavailable, match="multiple of 16"):
        _open(arch, weights, block_tokens=20)
    assert weights.keys() == random_weights(arch).keys()
    executor = _open(arch, weights, block_tokens=32)
    assert not weights
    assert executor.pages.shape == (4, native_bytes_per_block(arch, torch.float32, 32))
    assert executor.pages.data_ptr() % 64 == 0
    assert not executor.pages.any()
    executor.close()
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.forward(make_step([(Sequence(random_ids(3, 8), [1]), 3)]))


def _open(arch, weights, block_tokens):
    return NativeExecutor(
        build_program(arch),
        weights,
        dtype=torch.float32,
        blocks=4,
        block_tokens=block_tokens,
        threads=1,
        max_tokens=8,
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 520}, "head_dim 520"),
        ({"intermediate_size": 71}, "even"),
    ],
)
def test_models_it_cannot_run_are_refused(changes, words):
    with pytest.raises(NativeUnavailable, match=words):
        open_native(architecture(**changes))
