"""forebay and one other engine under W1 to W4, in turn."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from loadtest.bench.campaign import Contender, Report, run_campaign
from loadtest.bench.workloads import Workload
from loadtest.forebay_server import MODEL, running_forebay
from loadtest.peers.running import running_peer
from loadtest.peers.workshop import Tell
from loadtest.target import Target


async def compare_engine(
    name: str,
    workloads: Sequence[Workload],
    *,
    repeats: int,
    seed: int,
    root: Path | None,
    tell: Tell,
) -> list[Report]:
    """Reports of forebay and of the engine named, both with the bundled model and all cores.

    Only these two are in memory, and both end before this returns. Raises CampaignError if one of
    them cannot be started or measured.
    """
    tell(f"starting {name}")
    async with running_peer(name, key=secrets.token_urlsafe(32), root=root, tell=tell) as peer:
        tell(f"{name} was ready after {peer.start_s:.1f} s; starting forebay")
        async with running_forebay() as server:
            contenders = [
                Contender(Target("forebay", server.endpoint, MODEL), server.pid),
                Contender(peer.target, peer.pid),
            ]
            return await run_campaign(contenders, workloads, repeats=repeats, seed=seed, tell=tell)
