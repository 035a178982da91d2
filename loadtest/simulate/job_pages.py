"""The pages of one replica's jobs: what a job finds, holds, lets others find, and leaves behind.

As `engine.sequence_pages`. All pages for what a job knows when it is let in are taken then.
"""

from __future__ import annotations

from loadtest.simulate.job import SimJob
from loadtest.simulate.tiers import ReplicaTiers


class JobPages:
    """`leaders` are who computes which block: others wait for it instead of computing it too."""

    def __init__(self, tiers: ReplicaTiers, block_tokens: int, *, keeps_answers: bool) -> None:
        self._tiers = tiers
        self._pool = tiers.device
        self._block_tokens = block_tokens
        self._keeps_answers = keeps_answers
        self._leaders: dict[int, SimJob] = {}

    def found(self, job: SimJob) -> int:
        """How many of its first blocks are on the device."""
        if job.shipped or not job.blocks:
            return 0
        return self._pool.match(job.blocks)

    def follows(self, job: SimJob, found: int) -> bool:
        """Whether somebody is filling the first block behind those found."""
        blocks = job.blocks
        return not job.shipped and found < len(blocks) and blocks[found] in self._leaders

    def foresee(self, job: SimJob, found: int) -> None:
        """Set what it will compute, given that its first `found` blocks are here and others are
        being filled."""
        blocks, leaders = job.blocks, self._leaders
        reach = found
        while reach < len(blocks) and blocks[reach] in leaders:
            reach += 1
        known = 1 if job.shipped else job.known
        job.uncached = max(1, known - reach * self._block_tokens)

    def fits(self, job: SimJob, found: int, reserve: int) -> bool:
        """Whether there are pages for every known token besides what was found, and `reserve` are
        left."""
        blocks = self._pool.blocks
        revived = 0
        for block_id in job.blocks[:found]:
            if not blocks[block_id].holds:
                revived += 1
        missing = -(-job.known // self._block_tokens) - found
        return missing + revived + reserve <= self._pool.available

    def hold(self, job: SimJob, found: int) -> None:
        """Hold what was found of its blocks, and pages for all else that it knows; it is computed
        so far. It is going to fill the blocks behind them."""
        size, pool = self._block_tokens, self._pool
        whole = (job.known - 1) // size  # the last known token is computed in any case
        nodes = job.nodes = [pool.blocks[block_id] for block_id in job.blocks[: min(found, whole)]]
        for node in nodes:
            pool.hold(node)
        job.pages = -(-job.known // size)
        job.private = job.pages - len(nodes)
        job.computed = job.known - 1 if job.shipped else min(found * size, job.known - 1)
        taken_back = 0
        if job.rest is not None:
            # of use if all that is before it is here
            if found == len(job.blocks):
                taken_back = pool.take_rest(job.rest)
                before = -(-job.prompt_tokens // size) + taken_back
                job.computed = max(job.computed, min(before * size, job.known - 1))
            job.rest = None
        pool.take(job.private - taken_back)
        job.published = max(found, len(nodes))
        if not job.shipped:
            for block_id in job.blocks[found:]:
                self._leaders.setdefault(block_id, job)

    def publish(self, job: SimJob, blocks: int) -> None:
        """Let others find its first blocks."""
        pool, leaders, ids, nodes = self._pool, self._leaders, job.blocks, job.nodes
        first, end = job.published, min(blocks, len(ids))
        if end <= first:
            return
        pool.publish_chain(ids, range(first, end), self._tiers.savings_s(end), nodes)
        for block_id in ids[first:end]:
            if leaders.get(block_id) is job:
                del leaders[block_id]
        job.private -= end - first
        job.published = end

    def grown(self, job: SimJob, tokens: int) -> None:
        """As a stream it has come to hold pages for so many tokens."""
        pages = -(-tokens // self._block_tokens)
        if pages > job.pages:
            job.private += pages - job.pages
            job.pages = pages

    def release(self, job: SimJob) -> None:
        """Give its pages to the cache; others need not wait for it any more."""
        pool, size, leaders = self._pool, self._block_tokens, self._leaders
        for block_id in job.blocks[job.published :]:
            if leaders.get(block_id) is job:
                del leaders[block_id]
        of_prompt = 0
        if job.blocks and not job.shipped:
            of_prompt = -(-job.prompt_tokens // size)
        full = job.computed // size
        behind = min(full - of_prompt, job.private)
        whole_prompt = job.shipped or job.published >= len(job.blocks)
        if self._keeps_answers and behind > 0 and whole_prompt:
            parent = job.nodes[-1] if job.nodes else None
            rest = pool.leave_rest(behind, parent, self._tiers.savings_s(full)[full - 1])
            job.rest = None if job.shipped else rest
            job.private -= behind
        if job.private:
            pool.give(job.private)
        pool.release(job.nodes)
        job.nodes = []
        job.private = job.pages = 0

    def check_integrity(self, jobs: list[SimJob]) -> None:
        """Raise AssertionError unless every page is in one place, `jobs` being those that hold
        any, none of them a stream that has grown."""
        pool = self._pool
        pool.check_integrity()
        shared = sum(block.pages for block in pool.blocks.values() if block.holds)
        private = sum(job.private for job in jobs)
        assert pool.free + pool.cached + shared + private == pool.total, "a page is nowhere"
        assert all(leader in jobs for leader in self._leaders.values()), "a leader is gone"
        dram = self._tiers.dram
        if dram is not None:
            dram.check_integrity()
            assert dram.free + dram.cached == dram.total, "DRAM holds a block for nobody"
