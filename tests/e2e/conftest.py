"""One gateway for all tests that need no other: the bundled model and a tiny one, two tenants; and
one more for those that look into its Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cache.valkey import Valkey, running_valkey
from tests.e2e.client import AC_KEY, ACME_KEY, ORIGIN, Client
from tests.e2e.gateway_process import GatewayProcess
from tests.e2e.tiers import OPERATOR_KEY, SECRET, WORDS, device_bytes, dram_bytes
from tests.engine.checkpoints import tiny_checkpoint
from tests.engine.wordy_checkpoint import wordy_checkpoint

KEEP_ALIVE_S = 3
KEYS = {"ACME_KEY": ACME_KEY, "AC_KEY": AC_KEY}
SECRETS = {"FOREBAY_ADMIN_KEY": OPERATOR_KEY, "FOREBAY_SECRET": SECRET}
TENANTS = """
tenants:
  - {id: acme, keys: [{env: ACME_KEY}]}
  - {id: ac, keys: [{env: AC_KEY}]}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 model of three layers over bytes; thousands of tokens per second."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    return tiny_checkpoint("llama", directory, max_position_embeddings=8192)


@pytest.fixture(scope="session")
def wordy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float32 model, slow enough for prompts to be brought from DRAM and Redis."""
    return wordy_checkpoint(tmp_path_factory.mktemp("wordy") / "model", WORDS, 1024)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[GatewayProcess]:
    """Ready; `m` is the bundled model, `tiny` the random one, both in float32, where equal prompts
    have equal answers. The pages of `m` are few enough for caches to be evicted."""
    config = f"""
server: {{port: PORT, keep_alive_s: {KEEP_ALIVE_S}, log_level: debug, log_format: json,
  cors_origins: ["{ORIGIN}"]}}
models:
  - {{name: m, path: bundled, dtype: float32, step_tokens: 128, max_context: 1024,
     cache: {{device: 96MiB}}}}
  - {{name: tiny, path: "{tiny}", dtype: float32, max_context: 8192, max_running: 4,
     replicas: {{threads: 1}}, cache: {{device: 64MiB}}}}
{TENANTS}
"""
    directory = tmp_path_factory.mktemp("gateway")
    with GatewayProcess(directory, config, KEYS) as process:
        yield process.until_ready()


@pytest.fixture
def acme(gateway: GatewayProcess) -> Iterator[Client]:
    """A client with the key of the tenant `acme`."""
    with httpx.Client(base_url=gateway.url, timeout=120, verify=False) as http:
        yield Client(http, ACME_KEY)


@pytest.fixture
def ac(gateway: GatewayProcess) -> Iterator[Client]:
    """A client with the key of the tenant `ac`."""
    with httpx.Client(base_url=gateway.url, timeout=120, verify=False) as http:
        yield Client(http, AC_KEY)


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    """The Redis of `on_redis`."""
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def on_redis(
    tmp_path_factory: pytest.TempPathFactory, valkey: Valkey, wordy: Path
) -> Iterator[GatewayProcess]:
    """Ready; the model `wordy` as `m` with a pool of 816 tokens, over DRAM and a Redis that the
    tests can look into, where blocks live ten minutes if nobody asks for more."""
    config = f"""
server: {{port: PORT, log_level: debug, log_format: json}}
redis: {{url: "{valkey.url}", timeout_ms: 2000, ttl: 10m}}
models:
  - {{name: m, path: "{wordy}", dtype: float32, max_context: 704, step_tokens: 256,
     cache: {{device: {device_bytes(816)}, dram: {dram_bytes(4352)}}}}}
{TENANTS}
"""
    directory = tmp_path_factory.mktemp("on-redis")
    with GatewayProcess(directory, config, KEYS | SECRETS) as process:
        yield process.until_ready()
