"""What runs are called beside each other."""

from __future__ import annotations

from loadtest.record import Run
from loadtest.report.labels import is_sweep, shown
from tests.loadtest.report.made_runs import answer, run_of


def at_rate(rate: float, name: str = "one") -> Run:
    return run_of([answer(n, n / rate) for n in range(9)], name=name)


def test_runs_of_their_own_name_keep_it() -> None:
    runs = shown([at_rate(4.0, "b"), at_rate(2.0, "a")])
    assert [each.label for each in runs] == ["b", "a"]
    assert not is_sweep(runs)


def test_repeated_runs_are_numbered() -> None:
    runs = shown([at_rate(4.0), at_rate(4.4), at_rate(4.0, "other")])
    assert [each.label for each in runs] == ["one #1", "one #2", "other"]
    assert not is_sweep(runs)


def test_runs_that_are_known_to_be_repeated_are_no_sweep() -> None:
    runs = shown([at_rate(4.0), at_rate(2.0)], repeated=True)
    assert [each.label for each in runs] == ["one #1", "one #2"]
    assert not is_sweep(runs)


def test_runs_at_several_rates_have_them_in_their_labels_and_are_in_order() -> None:
    runs = shown([at_rate(4.0), at_rate(4.0, "other"), at_rate(2.0), at_rate(2.0)])
    labels = ["one at 2.00/s #1", "one at 2.00/s #2", "one at 4.00/s", "other"]
    assert [each.label for each in runs] == labels
    assert is_sweep(runs)
    assert len({each.key for each in runs}) == 4
