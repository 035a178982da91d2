from __future__ import annotations

from loadtest.simulate.directory import Place
from loadtest.simulate.sightings import Sightings


class Heard:
    def __init__(self) -> None:
        self.again: list[Place] = []
        self.forgotten: list[Place] = []
        self.sightings = Sightings(
            4,
            asked_again=self.again.append,
            forgotten=self.forgotten.append,
        )


def test_it_counts_how_often_a_block_was_asked_for() -> None:
    sightings = Heard().sightings
    sightings.see([1, 2])
    sightings.see([1, 3])
    assert [sightings.times_seen(block) for block in (1, 2, 3, 9)] == [2, 1, 1, 0]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    sightings = Heard().sightings
    sightings.see([1, 2, 3])
    sightings.see([7, 8])
    assert [sightings.times_seen(block) for block in (1, 2, 3, 7, 8)] == [1, 1, 0, 1, 1]


def test_what_was_pushed_out_comes_back_or_is_forgotten() -> None:
    heard = Heard()
    sightings = heard.sightings
    sightings.pushed_out(1, Place.DEVICE)
    sightings.see([1])
    sightings.see([1])
    assert heard.again == [Place.DEVICE]
    sightings.pushed_out(1, Place.DEVICE)
    sightings.pushed_out(1, Place.DRAM)
    assert heard.forgotten == [Place.DEVICE]
    sightings.see([5, 6, 7, 8])
    assert heard.forgotten == [Place.DEVICE, Place.DRAM]
    assert heard.again == [Place.DEVICE]
