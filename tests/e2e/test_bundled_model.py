"""The bundled model in float32: transformers' greedy text, whatever else the engine does meanwhile.

Greedy identity is checked by teacher forcing: transformers reads prompt and answer in one forward
pass and must rate every generated token first. By induction that is its own greedy text.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from engine.engine import Engine, EngineOptions
from engine.loading import bundled_model_path, load_model
from engine.opening import ExecutorOptions, open_executor
from tests.engine.harness import Collector, request, run_all

TOKENS = 64
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


def open_engine(collector: Collector, dtype: torch.dtype = torch.float32, **options: int) -> Engine:
    model = load_model(bundled_model_path(), name="bundled", dtype=dtype)
    blocks = options.pop("blocks", 1024)
    step_tokens = options.pop("step_tokens", 256)
    architecture = model.architecture
    executor = open_executor(
        model.architecture,
        model.weights,
        ExecutorOptions(
            torch.device("cpu"),
            dtype,
            pool_bytes=blocks * 16 * architecture.kv_elements_per_token * dtype.itemsize,
            step_tokens=step_tokens,
        ),
    )
    engine = Engine(
        executor,
        model.eos_token_ids,
        EngineOptions(max_context=512, step_tokens=step_tokens, **options),
        collector,
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_model(bundled_model_path(), name="bundled", dtype=torch.bfloat16).tokenizer
    return [tokenizer.encode_prompt(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def alone(prompts) -> list[list[int]]:
    """Each prompt's greedy text, one request at a time, nothing cached."""
    collector = Collector()
    engine = open_engine(collector)
    for i, ids in enumerate(prompts):
        run_all(engine, collector, [request(f"p{i}", ids, TOKENS, root=None)])
    engine.close()
    return [collector.outcomes[f"p{i}"].token_ids for i in range(len(prompts))]


def generate_all(prompts: list[list[int]], **options: int) -> tuple[list[list[int]], Collector]:
    collector = Collector()
    engine = open_engine(collector, **options)
    run_all(engine, collector, [request(f"p{i}", ids, TOKENS) for i, ids in enumerate(prompts)])
    engine.check_integrity()
    collector.stats = engine.stats()
    engine.close()
    return [collector.outcomes[f"p{i}"].token_ids for i in range(len(prompts))], collector


def test_greedy_text_is_that_of_transformers(prompts, alone):
    from transformers import AutoModelForCausalLM

    path = bundled_model_path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    for ids, text in zip(prompts, alone, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids + text])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == text


def test_text_is_the_same_batched_with_others(prompts, alone):
    texts, collector = generate_all(prompts, max_running=16)
    assert max(report.sequences for report in collector.reports) == 16
    assert texts == alone


def test_text_is_the_same_in_small_chunks(prompts, alone):
    texts, _ = generate_all(prompts, max_running=4, step_tokens=9)
    assert texts == alone


def test_text_is_the_same_after_preemption(prompts, alone):
    texts, collector = generate_all(prompts, max_running=16, blocks=40)
    assert collector.stats.preemptions > 0
    assert texts == alone


def test_text_is_the_same_from_the_cache(prompts, alone):
    collector = Collector()
    engine = open_engine(collector)
    for i, ids in enumerate(prompts):
        grown = ids + alone[i][:48]
        run_all(engine, collector, [request(f"cold{i}", grown, 16)])
        run_all(engine, collector, [request(f"warm{i}", grown, 16)])
        assert collector.outcomes[f"warm{i}"].cached_tokens >= 48
        assert collector.outcomes[f"warm{i}"].token_ids == alone[i][48:]
        assert collector.outcomes[f"cold{i}"].token_ids == alone[i][48:]
    engine.close()
