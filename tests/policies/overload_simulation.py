"""One replica under more load than it can take, with tenants who share it: simulated step by step.

The engine is what a scheduler of its kind comes down to: decodes in every step, prefills with what
is left of the step's tokens, and lets in whose flow has had least, by weight, as its slots allow.
Who comes is judged by the policies that the gateway judges by.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from policies.admission import Verdict, Wish, judge
from policies.arrival_rate import ArrivalRates
from policies.bench_routing import LEARNED
from policies.cost import StepShape
from policies.prediction_bias import PredictionBias
from policies.routing import Candidate, Prediction, Queued, RouteRequest, Standing
from policies.routing_prediction import predict

WEIGHTS = (1.0, 2.0, 4.0)
SLOTS = 16
ANSWER_TOKENS = 32


@dataclass(eq=False)
class Visit:
    """One request of the flow with this number."""

    flow: int
    prompt_tokens: int
    came_s: float
    predicted_s: float = 0.0
    uncomputed: int = field(init=False)
    ungenerated: int = ANSWER_TOKENS

    def __post_init__(self) -> None:
        self.uncomputed = self.prompt_tokens


@dataclass
class Outcome:
    """By flow: answers in time, answers that were late, requests that were refused, and tokens."""

    seconds: float
    met: list[int] = field(default_factory=lambda: [0] * len(WEIGHTS))
    late: list[int] = field(default_factory=lambda: [0] * len(WEIGHTS))
    shed: list[int] = field(default_factory=lambda: [0] * len(WEIGHTS))
    tokens: list[int] = field(default_factory=lambda: [0] * len(WEIGHTS))

    @property
    def goodput_per_s(self) -> float:
        return sum(self.met) / self.seconds

    @property
    def over_shares(self) -> list[float]:
        """Each flow's part of the tokens over its part of the weights."""
        parts = zip(self.tokens, WEIGHTS, strict=True)
        return [own / sum(self.tokens) / (weight / sum(WEIGHTS)) for own, weight in parts]


class Overload:
    """`in_turn`: first come, first served, and everybody is let in."""

    def __init__(self, ttft_s: float, *, in_turn: bool = False) -> None:
        self.waiting: list[Visit] = []
        self.running: list[Visit] = []
        self.now_s = 0.0
        self._ttft_s = ttft_s
        self._in_turn = in_turn
        self._served = [0.0] * len(WEIGHTS)
        self._virtual_time = 0.0
        self._biases = [PredictionBias() for _ in WEIGHTS]
        self._arrivals = ArrivalRates()

    def run(self, per_s: float, seconds: float, prompt_tokens: tuple[int, int]) -> Outcome:
        """Offer so much: half of it spread by weight, half evenly."""
        random, outcome = Random(7), Outcome(seconds)
        visits = []
        for flow, weight in enumerate(WEIGHTS):
            rate = per_s * (weight / sum(WEIGHTS) + 1 / len(WEIGHTS)) / 2
            at_s = random.expovariate(rate)
            while at_s < seconds:
                visits.append(Visit(flow, random.randint(*prompt_tokens), at_s))
                at_s += random.expovariate(rate)
        visits.sort(key=lambda visit: -visit.came_s)
        while self.now_s < seconds:
            if not (self.waiting or self.running):
                if not visits:
                    break
                self.now_s = max(self.now_s, visits[-1].came_s)
            while visits and visits[-1].came_s <= self.now_s:
                self._come(visits.pop(), outcome)
            self._step(outcome)
        return outcome

    def _come(self, visit: Visit, outcome: Outcome) -> None:
        request = RouteRequest(
            visit.prompt_tokens, ANSWER_TOKENS, 0, b"%d" % visit.flow, WEIGHTS[visit.flow]
        )
        prediction = predict(request, Candidate("m/0", LEARNED, self._standing()))
        visit.predicted_s = prediction.ttft_s
        bias = self._biases[visit.flow].factor(self.now_s)
        wish = Wish(self._ttft_s, None, self.now_s - visit.came_s, 60.0, "reject")
        corrected = Prediction(*(bias * term for term in prediction))
        if not self._in_turn and judge(corrected, wish).verdict is not Verdict.ADMIT:
            outcome.shed[visit.flow] += 1
            return
        if all(other.flow != visit.flow for other in self.waiting):
            self._served[visit.flow] = max(self._served[visit.flow], self._virtual_time)
        self.waiting.append(visit)
        self._arrivals.per_s(visit.flow, visit.prompt_tokens, self.now_s)

    def _standing(self) -> Standing:
        queued = []
        for flow, weight in enumerate(WEIGHTS):
            own = [
                each.prompt_tokens
                for each in (*self.waiting, *self.running)
                if each.flow == flow and each.uncomputed
            ]
            if own:
                per_s = self._arrivals.per_s(flow, 0, self.now_s)
                queued.append(Queued(0, len(own), sum(own), b"%d" % flow, weight, per_s))
        decoding = [each for each in self.running if not each.uncomputed]
        return Standing(
            pending_tokens=sum(each.tokens for each in queued),
            waiting=sum(each.sequences for each in queued),
            running=len(decoding),
            context_tokens=sum(each.prompt_tokens for each in decoding),
            max_running=SLOTS,
            queued=tuple(queued),
            answer_tokens=ANSWER_TOKENS,
        )

    def _step(self, outcome: Outcome) -> None:
        decoding = [each for each in self.running if not each.uncomputed]
        context = sum(each.prompt_tokens for each in decoding)
        budget = LEARNED.step_tokens - len(decoding)
        prefilling = [each for each in self.running if each.uncomputed]
        begun: list[Visit] = []
        sequences, tokens = len(decoding), len(decoding)
        while budget > 0:
            visit = prefilling.pop(0) if prefilling else self._next()
            if visit is None:
                break
            chunk = min(budget, visit.uncomputed)
            visit.uncomputed -= chunk
            budget -= chunk
            tokens, sequences = tokens + chunk, sequences + 1
            if not visit.uncomputed:
                begun.append(visit)
        self.now_s += LEARNED.step_s(StepShape(tokens, sequences, context, context))
        for visit in decoding:
            visit.ungenerated -= 1
            if not visit.ungenerated:
                self.running.remove(visit)
        for visit in begun:
            self._began(visit, outcome)

    def _next(self) -> Visit | None:
        if not self.waiting or len(self.running) >= SLOTS:
            return None
        flow = 0
        visit = self.waiting[0]
        if not self._in_turn:
            flow = min({each.flow for each in self.waiting}, key=self._served.__getitem__)
            visit = next(each for each in self.waiting if each.flow == flow)
            self._virtual_time = max(self._virtual_time, self._served[flow])
            work = visit.prompt_tokens + 2 * ANSWER_TOKENS
            self._served[flow] += work / WEIGHTS[flow]
        self.waiting.remove(visit)
        self.running.append(visit)
        return visit

    def _began(self, visit: Visit, outcome: Outcome) -> None:
        ttft_s = self.now_s - visit.came_s
        self._biases[visit.flow].observe(visit.predicted_s, ttft_s, self.now_s)
        (outcome.met if ttft_s <= self._ttft_s else outcome.late)[visit.flow] += 1
        outcome.tokens[visit.flow] += visit.prompt_tokens + ANSWER_TOKENS
