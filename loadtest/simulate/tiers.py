"""One replica's prompt cache: pages on the device over DRAM over a Redis that all share.

As `cache.tiered_cache`, in tokens and seconds: what is worth a copy below is asked when a block is
pushed out (`policies.tiering.WriteWorth`), what is worth loading when a prompt begins
(`choose_load`). Copies down take no time, as they are made ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.simulate.clock import Clock
from loadtest.simulate.directory import BlockDirectory, Place, TellOf
from loadtest.simulate.job import SimJob
from loadtest.simulate.pool import Block, BlockPool
from loadtest.simulate.redis_tier import RedisTier
from loadtest.simulate.sightings import Sightings
from policies.cost import CostModel
from policies.tiering import WriteWorth, choose_load, probe_is_worth, remembered_blocks

_ENGINE_BLOCK_TOKENS = 16
"""What the engine's blocks have: `WriteWorth` counts those, of which a trace's may be many."""


class ReplicaTiers:
    """`bit` is the replica's in `directory`. `device` may be another replica's as well: then what
    one publishes all have."""

    def __init__(
        self,
        clock: Clock,
        cost: CostModel,
        block_tokens: int,
        *,
        device_blocks: int,
        dram_blocks: int = 0,
        redis: RedisTier | None = None,
        directory: BlockDirectory | None = None,
        bit: int = 0,
        device: BlockPool | None = None,
    ) -> None:
        self.redis = redis
        self.dram: BlockPool | None = None
        device_stored: TellOf = _silent
        device_lost: TellOf = _silent
        self._dram_lost: TellOf = _silent
        if directory is not None:
            device_stored, device_lost = directory.tellers(Place.DEVICE, bit)
        self._device_lost = device_lost
        if dram_blocks:
            dram_stored: TellOf = _silent
            if directory is not None:
                dram_stored, self._dram_lost = directory.tellers(Place.DRAM, bit)
            self.dram = BlockPool(dram_blocks, stored=dram_stored, lost=self._pushed_from_dram)
        if device is None:
            lower = bool(dram_blocks) or redis is not None
            lost = self._pushed_from_device if lower else lambda block: device_lost(block.id)
            device = BlockPool(device_blocks, stored=device_stored, lost=lost)
        self.device = device
        self.loads = 0
        self._clock = clock
        self._cost = cost
        self._block_tokens = block_tokens
        self._savings_s: list[float] = []
        self._move_s = {
            tier: cost.load_s(tier, 1) - cost.load_s(tier, 0) for tier in ("dram", "redis")
        }
        self._per_block = per_block = max(1, round(block_tokens / _ENGINE_BLOCK_TOKENS))
        below = per_block * dram_blocks
        self._worths = {place: WriteWorth.over(below) for place in Place}
        kept = per_block * (device_blocks + dram_blocks)
        self._sightings = Sightings(
            max(1, remembered_blocks(kept) // per_block),
            asked_again=lambda place: self._worths[place].asked_again(per_block),
            forgotten=lambda place: self._worths[place].forgotten(per_block),
        )
        self._has_lower = bool(dram_blocks) or redis is not None
        self._copier_free_s = 0.0

    def savings_s(self, blocks: int) -> list[float]:
        """What a hit saves on each of a prompt's first `blocks` blocks, and maybe more of them; not
        to be changed."""
        savings = self._savings_s
        while len(savings) < blocks:
            start = len(savings) * self._block_tokens
            savings.append(self._cost.saving_s(start, self._block_tokens))
        return savings

    def look_up(self, job: SimJob) -> None:
        """A prompt is queued: note what was asked for, and have Redis bring what is worth it, by
        `job.ready_s`."""
        if not self._has_lower or not job.blocks:
            return
        self._sightings.see(job.blocks)
        redis = self.redis
        if redis is None:
            return
        first, end, tiers = self._below(job.blocks)
        from_redis = [index for index, tier in enumerate(tiers, first) if tier == "redis"]
        missing = len(job.blocks) - end + len(from_redis)
        if not from_redis or not probe_is_worth(
            missing, self._block_tokens, from_redis[0] * self._block_tokens, self._cost
        ):
            return
        kept = self._chosen(tiers, first, job.prompt_tokens, arrived=False)
        wanted = [index for index in from_redis if index < first + kept]
        if wanted:
            job.landed = range(wanted[0], wanted[-1] + 1)
            job.ready_s = self._clock.now_s + self._cost.load_s("redis", len(wanted))
            for index in wanted:
                redis.read(job.blocks[index])

    def land(self, job: SimJob) -> None:
        """What Redis has brought is in host memory now, for others as well if that is a tier."""
        if self.dram is not None:
            savings_s = self.savings_s(job.landed.stop)
            for index in job.landed:
                parent = job.blocks[index - 1] if index else None
                self.dram.drop_in(job.blocks[index], parent, savings_s[index], 0)

    def here(self, job: SimJob, on_device: int) -> int:
        """How many of its first blocks are on the device, which has so many, or behind those in
        DRAM."""
        if self.dram is None:
            return on_device
        end, blocks, dram = on_device, job.blocks, self.dram.blocks
        while end < len(blocks) and blocks[end] in dram:
            end += 1
        return end

    def loadable(self, job: SimJob, on_device: int) -> int:
        """How many blocks behind those on the device are worth copying up from host memory."""
        end, blocks = on_device, job.blocks
        if not self._has_lower or job.shipped:
            return 0
        dram = self.dram.blocks if self.dram is not None else {}
        while end < len(blocks) and (blocks[end] in dram or end in job.landed):
            end += 1
        if end == on_device:
            return 0
        tiers = ["dram"] * (end - on_device)
        return self._chosen(tiers, on_device, job.known, arrived=True)

    def copy_up(self, blocks: Sequence[int]) -> float:
        """Begin to copy these to the device, behind what is being copied already; when it is
        done."""
        self.loads += len(blocks)
        if self.dram is not None:
            self.dram.use(blocks)
        begin_s = max(self._clock.now_s, self._copier_free_s)
        self._copier_free_s = begin_s + self._cost.load_s("dram", len(blocks))
        return self._copier_free_s

    def prompt_done(self, job: SimJob) -> None:
        """A prompt is computed: what was asked for before goes down at once, to Redis through DRAM
        if there is one, else to DRAM."""
        if not self._has_lower:
            return
        redis, dram, times_seen = self.redis, self.dram, self._sightings.times_seen
        parent: int | None = None
        for index, block_id in enumerate(job.blocks):
            if times_seen(block_id) > 1 and (redis is None or block_id not in redis):
                if dram is not None:
                    block = self.device.blocks.get(block_id)
                    hits = 0 if block is None else block.hits
                    dram.drop_in(block_id, parent, self.savings_s(index + 1)[index], hits)
                if redis is not None:
                    redis.store(block_id)
            parent = block_id

    def _below(self, blocks: Sequence[int]) -> tuple[int, int, list[str]]:
        """From which block on the device lacks a prompt, up to which the lower tiers have it, and
        which of them each."""
        first = self.device.match(blocks)
        tiers = []
        dram = self.dram.blocks if self.dram is not None else {}
        for block_id in blocks[first:]:
            if block_id in dram:
                tiers.append("dram")
            elif self.redis is not None and block_id in self.redis:
                tiers.append("redis")
            else:
                break
        return first, first + len(tiers), tiers

    def _chosen(self, tiers: list[str], first: int, known_tokens: int, *, arrived: bool) -> int:
        """How many of the blocks from `first` on to load, of those in these tiers."""
        runs: list[tuple[str, int]] = []
        for tier in tiers:
            if runs and runs[-1][0] == tier:
                runs[-1] = (tier, runs[-1][1] + 1)
            else:
                runs.append((tier, 1))
        kept = choose_load(
            runs,
            start_block=first,
            block_tokens=self._block_tokens,
            prompt_tokens=known_tokens,
            cost=self._cost,
            arrived=arrived,
        )
        return sum(blocks for _, blocks in runs[:kept])

    def _pushed_from_device(self, block: Block) -> None:
        self._device_lost(block.id)
        dram = self.dram
        if dram is not None and block.id not in dram.blocks and self._is_worth(block, Place.DEVICE):
            dram.drop_in(block.id, block.parent, block.saving_s, block.hits)
        self._note_pushed_out(block.id, Place.DEVICE)

    def _pushed_from_dram(self, block: Block) -> None:
        self._dram_lost(block.id)
        redis = self.redis
        if redis is not None and block.id not in redis and self._is_worth(block, Place.DRAM):
            redis.store(block.id)
        self._note_pushed_out(block.id, Place.DRAM)

    def _is_worth(self, block: Block, place: Place) -> bool:
        """Whether to write it one tier down."""
        move_s = self._move_s["dram" if place is Place.DEVICE else "redis"]
        return self._worths[place].is_worth(
            hits=block.hits, saving_s=block.saving_s, load_s=move_s, store_s=move_s
        )

    def _note_pushed_out(self, block_id: int, place: Place) -> None:
        self._sightings.pushed_out(block_id, place)
        self._worths[place].pushed_out(self._per_block)


def _silent(_: int) -> None:
    """Of caches that nobody asks about."""
