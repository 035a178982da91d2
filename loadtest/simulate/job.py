"""One request on its way through the simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.pool import Block
from loadtest.trace import TraceRequest
from policies.fairness import TokenCounters
from policies.scheduling import Rank, due_s


class SimJob:
    """To the policies it is a `policies.job.Job`. Whoever has it owns every field: the front desk
    until it is placed, its replica from then on."""

    __slots__ = (
        "answer_tokens",
        "arrived_s",
        "asked_s",
        "begun",
        "blocks",
        "cached_blocks",
        "charged",
        "computed",
        "counters",
        "deadline_s",
        "due_s",
        "end_step",
        "first_s",
        "flow",
        "generated",
        "index",
        "known",
        "landed",
        "max_tokens",
        "nodes",
        "pages",
        "phase",
        "placed_s",
        "predicted_s",
        "prepaid",
        "private",
        "promised_by_s",
        "prompt_blocks",
        "prompt_tokens",
        "published",
        "rank",
        "ready_s",
        "replica",
        "replica_name",
        "rest",
        "shipped",
        "tag",
        "tenant",
        "tiers",
        "tpot_s",
        "turn",
        "uncached",
        "weight",
    )

    def __init__(
        self,
        index: int,
        request: TraceRequest,
        tenant: int,
        *,
        priority: int,
        flow: bytes,
        weight: float,
        ttft_s: float | None,
        tpot_s: float | None,
        reads_cache: bool = True,
        by_deadline: bool = True,
    ) -> None:
        """`index` numbers the requests in the order of arrival, `tenant` the tenants. Without
        `by_deadline`, its place in line is that of its arrival, whatever it was promised."""
        self.index = index
        self.tenant = tenant
        self.prompt_tokens = request.prompt_tokens
        # a trace's answer of no token is sent as one of one token, and counts as that
        self.answer_tokens = self.max_tokens = max(1, request.output_tokens)
        self.prompt_blocks = len(request.blocks)
        self.blocks: Sequence[int] = request.blocks if reads_cache else ()
        self.asked_s = request.at_s
        """When it was sent."""
        self.arrived_s = request.at_s
        """When it came to where it is now."""
        self.rank = Rank(priority, index)
        self.flow = flow
        self.weight = weight
        self.tpot_s = tpot_s
        self.promised_by_s = None if ttft_s is None else request.at_s + ttft_s
        """When its first token was promised."""
        self.deadline_s = self.promised_by_s if by_deadline else None
        self.due_s = due_s(request.at_s, self.deadline_s, request.at_s)
        self.known = request.prompt_tokens
        self.computed = 0
        self.generated = 0
        self.uncached = 0
        self.begun = False
        self.counters: TokenCounters | None = None
        self.tag: float | None = None
        self.prepaid = 0.0
        self.charged = 0
        self.turn = 0.0
        self.first_s: float | None = None
        self.replica = -1
        self.replica_name = ""
        """Where it was sent."""
        self.placed_s = 0.0
        self.predicted_s = 0.0
        """What was predicted for its first token when it was placed, uncorrected."""
        self.pages = 0
        """Pages that it holds; of these `private` are not published, and `nodes` are."""
        self.private = 0
        self.nodes: list[Block] = []
        self.published = 0
        """So many of its blocks are published, or need not be."""
        self.rest: Block | None = None
        """Of one that was preempted: what it had behind its prompt, as far as it is still there."""
        self.landed = range(0)
        """Blocks, by their place in the prompt, that Redis has brought for it."""
        self.ready_s = 0.0
        """When what Redis brings has landed."""
        self.shipped = False
        """Its KV comes with it from a replica that has computed its prompt."""
        self.tiers: tuple[int, int, int] | None = None
        """Prompt tokens that it found on the device, in DRAM and in Redis when it first ran."""
        self.cached_blocks = 0
        self.end_step = 0
        """As a stream: the number of the replica's step that ends its answer."""
        self.phase = 0
        """As a stream: in which of so many steps as a block has tokens it takes one more page."""

    def arrive(self, now_s: float, arrival: int) -> None:
        """It has come to a replica, as the `arrival`th."""
        self.arrived_s = now_s
        self.due_s = due_s(now_s, self.deadline_s, now_s)
        self.rank = Rank(self.rank.priority, arrival)
