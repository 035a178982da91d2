"""Two servers in turn, and what stops a campaign."""

from __future__ import annotations

import os

import pytest

from loadtest.bench import campaign
from loadtest.bench.campaign import CampaignError, Contender, run_campaign
from loadtest.bench.workloads import Workload
from loadtest.target import Target
from tests.loadtest.fake_server import Call, Reply, answer_well, fake_server

ONE = Workload("one", "", 1, 2, 0, 16, 2)
TWO = Workload("two", "", 1, 1, 0, 16, 2, ("cold", "hit"))


def unheard(line: str) -> None:
    """Progress that nobody reads."""


async def test_contenders_take_turns_with_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(campaign, "_REST_S", 0.0)
    told: list[str] = []
    async with fake_server(answer_well) as left, fake_server(answer_well) as right:
        reports = await run_campaign(
            [
                Contender(Target("left", left.endpoint, "m"), os.getpid()),
                Contender(Target("right", right.endpoint, "m")),
            ],
            [ONE, TWO],
            repeats=2,
            seed=5,
            tell=told.append,
        )

    assert told == [
        "left: warm-up",
        "right: warm-up",
        "left: one, 1 of 2",
        "right: one, 1 of 2",
        "left: two, 1 of 2",
        "right: two, 1 of 2",
        "right: one, 2 of 2",
        "left: one, 2 of 2",
        "right: two, 2 of 2",
        "left: two, 2 of 2",
    ]
    measured = [[call.body["prompt"] for call in server.calls[32:]] for server in (left, right)]
    assert measured[0] == measured[1]
    # Two repetitions of two single prompts and of one that is sent twice.
    assert len({tuple(prompt) for prompt in measured[0]}) == 2 * (2 + 1)
    assert [one.name for one in reports] == ["left", "right"]
    assert [one.workload for one in reports[0].repetitions] == ["one", "two"] * 2
    assert not any(one.failures for one in reports)
    assert reports[1].peak_rss_bytes is None


async def test_a_server_that_refuses_the_warm_up_is_not_measured() -> None:
    async def refusing(call: Call, reply: Reply) -> None:
        await reply.whole(401, b'{"error": {"message": "This API key is not valid."}}')

    async with fake_server(refusing) as server:
        contender = Contender(Target("shut", server.endpoint, "m"))
        with pytest.raises(CampaignError, match=r"^shut: status 401: This API key is not valid\.$"):
            await run_campaign([contender], [ONE], repeats=1, seed=0, tell=unheard)


async def test_two_servers_of_one_name_are_refused_before_anything_is_sent() -> None:
    async with fake_server(answer_well) as server:
        contender = Contender(Target("same", server.endpoint, "m"))
        with pytest.raises(CampaignError, match="same name"):
            await run_campaign([contender, contender], [ONE], repeats=1, seed=0, tell=unheard)

    assert not server.calls
