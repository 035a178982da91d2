"""Policies by name, from here and from elsewhere."""

import sys
from importlib import invalidate_caches

import pytest

from gateway.routing_policies import RoutingPolicyError, load_policy, policy_names
from policies.routing_policies import BUILT_IN, RoundRobin
from policies.routing_ttft import PredictedTtft

MODULE = """
class First:
    def choose(self, request, candidates, random):
        return 0

class Speechless:
    pass

def broken():
    raise RuntimeError("no luck today")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Put a distribution with these entry points on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "third_party_routing.py").write_text(MODULE)

    def install(distribution: str, **offers: str) -> None:
        info = tmp_path / f"{distribution}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n"
        )
        lines = [f"{name} = third_party_routing:{target}" for name, target in offers.items()]
        (info / "entry_points.txt").write_text(
            "[forebay.routing_policies]\n" + "\n".join(lines) + "\n"
        )
        invalidate_caches()

    yield install
    sys.modules.pop("third_party_routing", None)


def test_every_built_in_policy_is_found_and_new_each_time() -> None:
    for name, kind in BUILT_IN.items():
        assert type(load_policy(name)) is kind
    assert load_policy("round-robin") is not load_policy("round-robin")
    assert isinstance(load_policy("predicted-ttft"), PredictedTtft)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RoutingPolicyError, match=r"'warmest'.*predicted-ttft.*round-robin"):
        load_policy("warmest")


def test_another_distribution_offers_a_policy(install) -> None:
    install("elsewhere", first="First")
    policy = load_policy("first")
    assert type(policy).__name__ == "First"
    assert "first" in policy_names()
    assert set(BUILT_IN) <= set(policy_names())


def test_a_built_in_name_cannot_be_taken(install) -> None:
    install("elsewhere", **{"round-robin": "First"})
    assert isinstance(load_policy("round-robin"), RoundRobin)


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("broken", "elsewhere 1.2 cannot be made: RuntimeError: no luck today"),
        ("missing", "elsewhere 1.2 cannot be made: AttributeError"),
        ("Speechless", "elsewhere 1.2 has no method `choose`"),
    ],
)
def test_what_cannot_be_made_is_named(install, target: str, complaint: str) -> None:
    install("elsewhere", odd=target)
    with pytest.raises(RoutingPolicyError, match=complaint):
        load_policy("odd")


def test_two_offers_of_one_name_are_refused(install) -> None:
    install("elsewhere", first="First")
    install("nowhere", first="Speechless")
    with pytest.raises(RoutingPolicyError, match=r"elsewhere 1\.2 and nowhere 1\.2"):
        load_policy("first")
