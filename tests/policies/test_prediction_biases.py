"""What predictions are multiplied by, for whom."""

from __future__ import annotations

import pytest

from policies.prediction_biases import PredictionBiases


def late(biases: PredictionBiases, flow: bytes, factor: float, times: int = 60) -> None:
    for _ in range(times):
        biases.observe("r0", 1, flow, predicted_s=1.0, actual_s=factor, now_s=0.0)


def test_a_flow_has_its_own_and_others_have_what_their_class_shows() -> None:
    biases = PredictionBiases()
    assert biases.factor("r0", 1, b"a", 0.0) == 1.0
    late(biases, b"a", 2.0)
    late(biases, b"b", 1.0, times=1)
    assert biases.factor("r0", 1, b"a", 0.0) == pytest.approx(2.0, rel=0.05)
    assert biases.factor("r0", 1, b"c", 0.0) == pytest.approx(1.85, rel=0.05)
    assert biases.factor("r0", 0, b"a", 0.0) == 1.0
    assert biases.factor("r1", 1, b"a", 0.0) == 1.0


def test_a_flow_begins_with_what_its_class_has_shown() -> None:
    biases = PredictionBiases()
    late(biases, b"a", 2.0)
    late(biases, b"b", 2.0, times=1)
    assert biases.factor("r0", 1, b"b", 0.0) == pytest.approx(2.0, rel=0.05)


def test_who_is_gone_is_forgotten() -> None:
    biases = PredictionBiases()
    late(biases, b"a", 2.0)
    biases.forget("r0")
    assert biases.factor("r0", 1, b"a", 0.0) == 1.0


def test_the_flow_that_was_answered_longest_ago_is_forgotten_when_there_are_too_many() -> None:
    biases = PredictionBiases()
    late(biases, b"first", 4.0)
    for number in range(4096):
        biases.observe("r0", 1, b"%d" % number, predicted_s=1.0, actual_s=1.0, now_s=0.0)
    assert biases.factor("r0", 1, b"first", 0.0) < 1.05  # its class's by now
