"""The bundled model in float32: transformers' greedy text, whatever else the engine does meanwhile.

Greedy identity is checked by teacher forcing: transformers reads prompt and answer in one forward
pass and must rate every generated token first. By induction that is its own greedy text.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import gguf
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from engine.bundled_model import bundled_model_path
from engine.engine import Engine, EngineOptions
from engine.executors.base import Executor, StepBatch
from engine.loading import load_model
from engine.model import Model
from engine.opening import ExecutorOptions, open_executor
from tests.engine.harness import Collector, request, run_all

TOKENS = 64
ALONE_TOKENS = 16
"""Of most texts when nobody else is there: that costs a reading of the whole model for a token."""
BLOCKS = 256
STEP_TOKENS = 256
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a village by the sea,",
    "The three laws of thermodynamics state that",
    "Q: What is 17 * 3?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear hiring manager,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM orders",
    "Water boils at 100 degrees Celsius because",
    "La plus grande ville du Canada est",
    "Photosynthesis is the process by which",
    "To bake a loaf of bread you need",
    "The quick brown fox",
    "In 1969, Neil Armstrong",
    "import numpy as np\n\ndef softmax(x):\n",
    "The difference between a list and a tuple in Python is",
    "Shakespeare wrote many plays, among them",
    "The mitochondria is",
    "東京は日本の",
    "A haiku about autumn:\n",
]


OpenEngine = Callable[..., AbstractContextManager[Engine]]


class Lent:
    """The module's one executor as an engine's own: with the first so many of its pages, empty, and
    not closed with the engine. Packing the weights takes longer than most of the texts."""

    def __init__(self, executor: Executor, blocks: int) -> None:
        self.name, self.kv_layout = executor.name, executor.kv_layout
        self.device, self.dtype = executor.device, executor.dtype
        self.block_tokens = executor.block_tokens
        self.pages = executor.pages[:blocks].zero_()
        self._executor = executor

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._executor.forward(batch)

    def close(self) -> None:
        """The engine does not step any more; the next one may."""


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(bundled_model_path(), name="bundled", dtype=torch.float32)


@pytest.fixture(scope="module")
def executor(model: Model) -> Iterator[Executor]:
    architecture = model.architecture
    options = ExecutorOptions(
        torch.device("cpu"),
        torch.float32,
        pool_bytes=BLOCKS * 16 * architecture.kv_elements_per_token * torch.float32.itemsize,
        step_tokens=STEP_TOKENS,
    )
    executor = open_executor(architecture, model.weights, options)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def open_engine(model: Model, executor: Executor) -> OpenEngine:
    """Opens an engine for a scope, with a cache of its own."""

    @contextmanager
    def opened(
        collector: Collector, blocks: int = BLOCKS, step_tokens: int = STEP_TOKENS, **more: int
    ) -> Iterator[Engine]:
        options = EngineOptions(max_context=512, step_tokens=step_tokens, **more)
        engine = Engine(Lent(executor, blocks), model.eos_token_ids, options, collector)
        engine.start()
        try:
            yield engine
        finally:
            engine.close()

    return opened


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    return [model.tokenizer.encode_prompt(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def batched(prompts: list[list[int]], open_engine: OpenEngine) -> tuple[list[list[int]], Collector]:
    """Each prompt's greedy text, sixteen at a time, and what the engine said meanwhile."""
    return generate_all(prompts, open_engine, max_running=16)


def generate_all(
    prompts: list[list[int]], open_engine: OpenEngine, **options: int
) -> tuple[list[list[int]], Collector]:
    collector = Collector()
    with open_engine(collector, **options) as engine:
        run_all(engine, collector, [request(f"p{i}", ids, TOKENS) for i, ids in enumerate(prompts)])
        engine.check_integrity()
        collector.stats = engine.stats()
    return [collector.outcomes[f"p{i}"].token_ids for i in range(len(prompts))], collector


def test_greedy_text_is_that_of_transformers(prompts, batched, monkeypatch):
    from transformers import AutoModelForCausalLM

    # transformers would read the file twice, vocabulary and all, and make the table of the tensors'
    # names anew for each module.
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    path = bundled_model_path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    texts, collector = batched
    assert max(report.sequences for report in collector.reports) == 16
    answered = [torch.tensor(ids + text) for ids, text in zip(prompts, texts, strict=True)]
    with torch.inference_mode():
        # What is padded comes last, and nothing attends to what comes after it.
        rated = model(pad_sequence(answered, batch_first=True)).logits
    for ids, text, logits in zip(prompts, texts, rated, strict=True):
        assert len(text) == TOKENS
        assert logits[len(ids) - 1 :][:TOKENS].argmax(-1).tolist() == text


def test_text_is_the_same_alone(prompts, batched, open_engine):
    """One request at a time, nothing cached; every fifth to its end."""
    texts, _ = batched
    collector = Collector()
    with open_engine(collector) as engine:
        for i, ids in enumerate(prompts):
            tokens = ALONE_TOKENS if i % 5 else TOKENS
            run_all(engine, collector, [request(f"p{i}", ids, tokens, root=None)])
            assert collector.outcomes[f"p{i}"].token_ids == texts[i][:tokens]
    assert max(report.sequences for report in collector.reports) == 1


def test_text_is_the_same_in_small_chunks(prompts, batched, open_engine):
    texts, _ = generate_all(prompts, open_engine, max_running=4, step_tokens=9)
    assert texts == batched[0]


def test_text_is_the_same_after_preemption(prompts, batched, open_engine):
    texts, collector = generate_all(prompts, open_engine, max_running=16, blocks=40)
    assert collector.stats.preemptions > 0
    assert texts == batched[0]


def test_text_is_the_same_from_the_cache(prompts, batched, open_engine):
    texts, _ = batched
    grown = [ids + text[:48] for ids, text in zip(prompts, texts, strict=True)]
    collector = Collector()
    with open_engine(collector) as engine:
        for when in ("cold", "warm"):
            asked = [request(f"{when}{i}", ids, 16) for i, ids in enumerate(grown)]
            run_all(engine, collector, asked)
    for i, text in enumerate(texts):
        assert collector.outcomes[f"cold{i}"].cached_tokens == 0
        assert collector.outcomes[f"warm{i}"].cached_tokens >= 48
        assert collector.outcomes[f"warm{i}"].token_ids == text[48:]
        assert collector.outcomes[f"cold{i}"].token_ids == text[48:]
