"""Arithmetic and bytes of steps, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.architecture import Architecture, Layer, Rope
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.scheduler import Chunk
from engine.sequence import Sequence
from engine.step_work import ModelWork

# Four query heads of 4 share two KV heads; the second and third layer see 8 positions.
TINY = Architecture(
    family="llama",
    vocab_size=100,
    hidden_size=16,
    intermediate_size=24,
    heads=4,
    kv_heads=2,
    head_dim=4,
    max_positions=256,
    norm_eps=1e-5,
    layers=(Layer(None, 0), Layer(8, 0), Layer(8, 0)),
    ropes=(Rope((1.0, 0.1)),),
    attention_scale=0.5,
    activation="silu",
    embedding_scale=1.0,
    tied_embeddings=True,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    sandwich_norms=False,
)
# query and output 16 x 16, key and value 8 x 16, gate, up and down 24 x 16, in three layers
LINEAR = 3 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 24 * 16)
HEAD = 16 * 100
SCORE = 4 * 4 * 4
KV_BYTES = 2 * (2 * 4) * 2
BLOCK = 16
WORK = ModelWork.of(TINY, 2, BLOCK)


def sequence(
    known: int, computed: int, pages: list[int] | None = None, logprobs: int | None = None
) -> Sequence:
    """One with so many known tokens, in pages of its own unless others are given."""
    made = Sequence(
        EngineRequest(
            request_id="r",
            prompt_token_ids=tuple(range(known)),
            params=SamplingParams(max_tokens=1, prompt_logprobs=logprobs),
            chain_root=b"r" * 16,
        ),
        0,
    )
    made.computed = computed
    own = range(id(made), id(made) + -(-known // BLOCK))
    made.pages = list(own) if pages is None else pages
    return made


def test_a_prompt_in_one_chunk() -> None:
    work = WORK.of_step([Chunk(sequence(10, 0), 10)])
    full = 10 * 11 // 2
    windowed = 8 * 9 // 2 + 2 * 8  # 1, 2, ... 8, and then 8 each
    assert work.flops == 2 * LINEAR * 10 + 2 * HEAD + SCORE * (full + 2 * windowed)
    assert work.bytes == 2 * LINEAR + 2 * HEAD + KV_BYTES * 3 * 10
    assert work.prefill


def test_a_chunk_in_the_middle_has_no_logits_and_reads_what_its_windows_reach() -> None:
    work = WORK.of_step([Chunk(sequence(100, 20), 5)])
    full = 21 + 22 + 23 + 24 + 25
    assert work.flops == 2 * LINEAR * 5 + SCORE * (full + 2 * 5 * 8)
    read = 20 + 2 * 7  # the first query sees itself and seven before it
    assert work.bytes == 2 * LINEAR + KV_BYTES * (read + 3 * 5)
    assert work.prefill


def test_decoding_several_reads_the_weights_once() -> None:
    work = WORK.of_step([Chunk(sequence(5, 4), 1), Chunk(sequence(41, 40), 1)])
    assert work.flops == 2 * LINEAR * 2 + 2 * HEAD * 2 + SCORE * (5 + 41 + 2 * (5 + 8))
    assert work.bytes == 2 * LINEAR + 2 * HEAD + KV_BYTES * (4 + 40 + 2 * (4 + 7) + 3 * 2)
    assert not work.prefill


def test_every_row_whose_logits_are_wanted_passes_the_head() -> None:
    quiet, wanted = (WORK.of_step([Chunk(sequence(9, 2, logprobs=n), 4)]) for n in (None, 0))
    assert wanted.flops - quiet.flops == 2 * HEAD * 4
    assert wanted.bytes - quiet.bytes == 2 * HEAD


def test_kv_in_the_same_pages_is_read_once() -> None:
    # behind two shared pages (32 tokens): 8, 20 and 8 tokens of their own
    tails = ([3, 4], [5, 6], [7, 8])
    lengths = (40, 52, 40)
    chunks = [
        Chunk(sequence(length + 1, length, [1, 2, *tail]), 1)
        for length, tail in zip(lengths, tails, strict=True)
    ]
    apart = [Chunk(sequence(length + 1, length), 1) for length in lengths]
    together = WORK.of_step(chunks)
    assert together.flops == WORK.of_step(apart).flops
    # the windows of those that have 40 tokens begin at 33, behind what they share
    assert WORK.of_step(apart).bytes - together.bytes == KV_BYTES * 2 * 32
    near = [Chunk(sequence(34, 33, [1, 2, last]), 1) for last in (3, 4)]
    apart = [Chunk(sequence(34, 33), 1) for _ in range(2)]
    shared = WORK.of_step(apart).bytes - WORK.of_step(near).bytes
    assert shared == KV_BYTES * (32 + 2 * 6)  # of positions 26 to 32 the last is one's own


@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=2, max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_shared_pages_are_counted_as_the_set_of_pages(
    shared: int, others: list[tuple[int, int]]
) -> None:
    full = ModelWork.of(replace(TINY, layers=TINY.layers[:1]), 2, BLOCK)
    sequences = []
    for number, (blocks, rest) in enumerate(others):
        prefix = list(range(shared))
        own = [1000 * (number + 1) + at for at in range(blocks + 5)]
        computed = BLOCK * (len(prefix) + blocks) + rest
        sequences.append(sequence(computed + 1, computed, [*prefix, *own]))
    work = full.of_step([Chunk(each, 1) for each in sequences])
    distinct = shared * BLOCK + sum(each.computed - shared * BLOCK for each in sequences)
    moved = distinct + len(sequences)
    assert work.bytes == full.linear_bytes + full.head_bytes + KV_BYTES * moved


@given(st.integers(1, 90), st.lists(st.integers(1, 30), max_size=8))
@settings(max_examples=50, deadline=None)
def test_a_prompt_has_the_same_arithmetic_in_any_chunks(tokens: int, cuts: list[int]) -> None:
    whole = WORK.of_step([Chunk(sequence(tokens, 0), tokens)])
    flops, one = 0, sequence(tokens, 0)
    for cut in [*cuts, tokens]:
        count = min(cut, tokens - one.computed)
        if count:
            flops += WORK.of_step([Chunk(one, count)]).flops
            one.computed += count
    assert flops == whole.flops
