"""Whose prompts are cached for whom, round block boundaries, and across a change of weights."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.client import ACME_KEY, CHAT, COMPLETIONS, Client, chat, completion
from tests.e2e.conftest import KEYS, TENANTS
from tests.e2e.gateway_process import GatewayProcess, eventually

SECRET = "The launch code of the northern silo is seven three nine, and nobody must know. " * 3
BLOCK = 16


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def text(answer: dict[str, Any]) -> str:
    words: str = answer["choices"][0]["text"]
    return words


@pytest.mark.parametrize("model", ["m", "tiny"])
def test_no_tenant_hits_what_another_warmed(acme: Client, ac: Client, model: str) -> None:
    # "ac" + "me1" and "acme" + "1" must not meet either
    salted = {"cache_salt": "1", "user": "u", "prompt_cache_key": "k"}
    secret = chat("Go on.", model, max_tokens=1)
    secret["messages"].insert(0, {"role": "system", "content": SECRET})
    for fields in ({}, salted):
        body = secret | fields
        assert cached(acme.whole(CHAT, body)) == 0
        assert cached(acme.whole(CHAT, body)) >= 32  # else the rest proves nothing
    for fields in ({}, salted, {"cache_salt": "1"}, {"cache_salt": "me1"}, {"cache_salt": "acme"}):
        assert cached(ac.whole(CHAT, secret | fields)) == 0
    assert cached(ac.whole(CHAT, secret)) >= 32


@pytest.mark.parametrize("model", ["m", "tiny"])
def test_prompts_round_whole_blocks_answer_as_if_cold(acme: Client, model: str) -> None:
    source = acme.whole("/tokenize", {"model": model, "prompt": SECRET})["tokens"]
    surprising = source[: -2 * BLOCK - 1 : -1]  # no model answers with this by itself
    for length in [k * BLOCK + d for k in (1, 2) for d in (-1, 0, 1)]:
        salt = f"round {length}"
        body = completion(source[:length], model, max_tokens=4, ignore_eos=True)
        cold = acme.whole(COMPLETIONS, body | {"cache_salt": salt + " cold"})
        first = acme.whole(COMPLETIONS, body | {"cache_salt": salt})
        again = acme.whole(COMPLETIONS, body | {"cache_salt": salt})
        assert cached(cold) == cached(first) == 0
        assert cached(again) == length - 1  # the answer has filled the tail's block
        assert text(cold) == text(first) == text(again)
        # the blocks after a hit are cached as well, and rightly
        longer = body | {"prompt": source[:length] + surprising}
        grown = acme.whole(COMPLETIONS, longer | {"cache_salt": salt})
        assert cached(grown) == length // BLOCK * BLOCK
        repeated = acme.whole(COMPLETIONS, longer | {"cache_salt": salt})
        assert cached(repeated) == length + 2 * BLOCK - 1
        of_cold = acme.whole(COMPLETIONS, longer | {"cache_salt": salt + " cold, longer"})
        assert text(grown) == text(repeated) == text(of_cold)


@pytest.fixture
def swappable(tmp_path: Path, tiny: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def serve(tmp_path: Path, model: Path) -> GatewayProcess:
    config = f"""
server: {{port: PORT}}
models: [{{name: same, path: "{model}", dtype: float32, cache: {{device: 16MiB}}}}]
{TENANTS}
"""
    return GatewayProcess(tmp_path / "gateway", config, KEYS)


def swap_weights(model: Path) -> None:
    """Put other weights at the same path, as a deployment would: a new file, renamed over it."""
    file = model / "model.safetensors"
    weights = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
    save_file(weights, model / "new", metadata={"format": "pt"})
    os.replace(model / "new", file)


def asked(gateway: GatewayProcess) -> Iterator[dict[str, Any]]:
    """The answers to one prompt, asked again and again."""
    with httpx.Client(base_url=gateway.url, timeout=60, verify=False) as http:
        client = Client(http, ACME_KEY)
        while True:
            yield client.whole(COMPLETIONS, completion(SECRET, "same", max_tokens=16))


def test_other_weights_under_the_same_name_have_no_cache(tmp_path: Path, swappable: Path) -> None:
    with serve(tmp_path, swappable) as old:
        answers = asked(old.until_ready())
        cold, warm = next(answers), next(answers)
        assert cached(cold) == 0 < cached(warm)
        assert text(cold) == text(warm)
        swap_weights(swappable)
        old.send(signal.SIGHUP)  # models do not change while running
        eventually(lambda: old.metrics().total("forebay_config_reloads_total") >= 1, 10)
        still = next(answers)
        assert cached(still) == cached(warm)
        assert (text(still), still["system_fingerprint"]) == (
            text(cold),
            cold["system_fingerprint"],
        )
        old.send(signal.SIGTERM)
        assert old.exit_code() == 0
    with serve(tmp_path, swappable) as new:
        answers = asked(new.until_ready())
        first, second = next(answers), next(answers)
        assert cached(first) == 0 < cached(second)
        assert text(first) == text(second) != text(cold)
        assert first["system_fingerprint"] != cold["system_fingerprint"]
