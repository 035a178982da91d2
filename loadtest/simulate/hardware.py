"""What work takes on a replica that is not at hand: from sizes of models and machines.

The figures are those of the cost model (`policies.cost`): a step streams the weights once, computes
its tokens, and reads the context of each of its sequences. Real kernels overlap some of that; the
shares of the peak that they reach (`compute_share`, `memory_share`) are what is left to choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from policies.cost import Coefficients

_ENGINE_BLOCK_TOKENS = 16


class ModelSize(NamedTuple):
    """A decoder: parameters, layers, heads (`kv_heads` of them keep keys and values), what a head
    has, and the bytes of a number."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    number_bytes: int = 2

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_width * self.number_bytes


class Machine(NamedTuple):
    """One card: peak arithmetic and memory bandwidth, the shares of both that kernels reach, its
    memory, and what KV moves at from host memory and from Redis. `step_overhead_s` is what a step
    takes beside all that (launches, sampling, the scheduler)."""

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float
    compute_share: float = 0.5
    memory_share: float = 0.8
    dram_bytes_per_s: float = 25e9
    redis_bytes_per_s: float = 5e9
    step_overhead_s: float = 1e-3


class ReplicaKind(NamedTuple):
    """What work takes there, how many sequences it runs at once, and the tokens of KV that its
    device holds."""

    cost: Coefficients
    max_running: int
    device_tokens: int


LLAMA_8B = ModelSize(8.03e9, layers=32, heads=32, kv_heads=8, head_width=128)
H100 = Machine(flops_per_s=989e12, memory_bytes_per_s=3.35e12, memory_bytes=80e9)
"""NVIDIA H100 SXM5 80 GB: dense bfloat16 and HBM3 as in its data sheet."""
_USED_SHARE = 0.9
"""Of a card's memory, what weights, activations and KV may take together."""
_ACTIVATION_BYTES = 2e9


def computed_kind(
    model: ModelSize, machine: Machine, *, step_tokens: int = 2048, max_running: int = 128
) -> ReplicaKind:
    """`model` on `machine`. Raises ValueError where the weights do not fit."""
    compute_per_s = machine.flops_per_s * machine.compute_share
    read_per_s = machine.memory_bytes_per_s * machine.memory_share
    weight_bytes = model.parameters * model.number_bytes
    kv_bytes = model.kv_token_bytes
    room = machine.memory_bytes * _USED_SHARE - weight_bytes - _ACTIVATION_BYTES
    if room < kv_bytes * _ENGINE_BLOCK_TOKENS:
        raise ValueError(f"{weight_bytes / 1e9:.0f} GB of weights leave no room for KV")
    token_s = 2 * model.parameters / compute_per_s
    cost = Coefficients(
        constant_s=weight_bytes / read_per_s + machine.step_overhead_s,
        token_s=token_s,
        sequence_s=token_s / 4,
        # two products of a query with a key and of a weight with a value, two operations each
        attended_s=4 * model.layers * model.heads * model.head_width / compute_per_s,
        context_read_s=kv_bytes / read_per_s,
        dram_latency_s=100e-6,
        dram_block_s=kv_bytes * _ENGINE_BLOCK_TOKENS / machine.dram_bytes_per_s,
        redis_latency_s=1e-3,
        redis_block_s=kv_bytes * _ENGINE_BLOCK_TOKENS / machine.redis_bytes_per_s,
        step_tokens=step_tokens,
        block_tokens=_ENGINE_BLOCK_TOKENS,
    )
    return ReplicaKind(cost, max_running, int(room / kv_bytes))


BUNDLED_CPU = ReplicaKind(
    Coefficients(
        constant_s=5e-3,
        token_s=225e-6,
        sequence_s=300e-6,
        attended_s=2e-9,
        context_read_s=1e-8,
        dram_latency_s=50e-6,
        dram_block_s=70e-6,
        redis_latency_s=1e-3,
        redis_block_s=400e-6,
        step_tokens=256,
        block_tokens=_ENGINE_BLOCK_TOKENS,
    ),
    max_running=16,
    device_tokens=1456 * _ENGINE_BLOCK_TOKENS,
)
"""About the bundled model (SmolLM2-135M) on two cores, with the 512 MiB of pages that it has by
default; a machine's own figures come from a forebay that runs there."""

KINDS: dict[str, ReplicaKind] = {
    "bundled-cpu": BUNDLED_CPU,
    "8b-h100": computed_kind(LLAMA_8B, H100),
}
"""By name."""


def given_cost(values: Mapping[str, Any]) -> Coefficients:
    """Coefficients by name, as in a file of one's own or as a forebay tells them of a replica: all
    times in seconds, as `policies.cost.Coefficients` names them.

    Raises ValueError for a name that is missing or unknown, and for a value that is no positive
    number, or of `step_tokens` and `block_tokens` no whole one.
    """
    names = Coefficients._fields
    wrong = sorted(set(names) ^ set(values))
    if wrong:
        raise ValueError(f"coefficients are {', '.join(names)}; not right: {', '.join(wrong)}")
    for name, value in values.items():
        kind = int if name.endswith("_tokens") else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
            raise ValueError(f"{name} must be a positive number, not {value!r}")
    return Coefficients._make(values[name] for name in names)


def with_block_tokens(cost: Coefficients, block_tokens: int) -> Coefficients:
    """The same replica told in blocks of another size: moving a token takes as long as before."""
    factor = block_tokens / cost.block_tokens
    return cost._replace(
        dram_block_s=cost.dram_block_s * factor,
        redis_block_s=cost.redis_block_s * factor,
        block_tokens=block_tokens,
    )
