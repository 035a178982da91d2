"""By how much predictions for replicas have lately been off, for whom."""

from __future__ import annotations

from collections import OrderedDict

from policies.prediction_bias import PredictionBias

_MOST_FLOWS = 4096
"""At all replicas together; who was answered longest ago is forgotten beyond that."""


class PredictionBiases:
    """By replica, priority and flow: a prediction knows who waits now, and not who will come. Those
    of a small share are overtaken by what comes for the others, those of a large one overtake.

    Of a flow that nothing is known of, what its class shows is taken. Times are seconds of one
    clock.
    """

    def __init__(self) -> None:
        self._classes: dict[tuple[str, int], PredictionBias] = {}
        self._flows: OrderedDict[tuple[str, int, bytes], PredictionBias] = OrderedDict()

    def observe(
        self,
        replica: str,
        priority: int,
        flow: bytes,
        *,
        predicted_s: float,
        actual_s: float,
        now_s: float,
    ) -> None:
        """A first token has come after `actual_s`, for which `predicted_s` was predicted without
        any correction."""
        of_class = self._classes.get((replica, priority))
        if of_class is None:
            of_class = self._classes[replica, priority] = PredictionBias()
        key = replica, priority, flow
        of_flow = self._flows.get(key)
        if of_flow is None:
            before = of_class.factor(now_s)
            of_flow = self._flows[key] = PredictionBias(before, now_s)
            if len(self._flows) > _MOST_FLOWS:
                self._flows.popitem(last=False)
        self._flows.move_to_end(key)
        for bias in (of_class, of_flow):
            bias.observe(predicted_s, actual_s, now_s)

    def factor(self, replica: str, priority: int, flow: bytes, now_s: float) -> float:
        """What a prediction for such a request is to be multiplied by."""
        bias = self._flows.get((replica, priority, flow))
        if bias is None:
            bias = self._classes.get((replica, priority))
        return 1.0 if bias is None else bias.factor(now_s)

    def forget(self, replica: str) -> None:
        """It is gone."""
        for key in [each for each in self._classes if each[0] == replica]:
            del self._classes[key]
        for flow in [each for each in self._flows if each[0] == replica]:
            del self._flows[flow]
