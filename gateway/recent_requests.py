"""The last requests and how each met the cache, for whoever asks why one missed.

Token counts and positions only: no text, and no token from which text could be had.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from cache.report import CacheUse
from gateway.dispatch.receipt import Receipt
from gateway.prompts import Prompt
from gateway.request import Request
from gateway.served_model import ServedModel
from gateway.turns import Place, locate, turn_openers

REMEMBERED = 1000
_RECEIPTS_EACH = 8
"""So many receipts are remembered for each request on average: one may have hundreds of choices,
and each of its receipts tells of every replica."""


@dataclass(frozen=True, slots=True)
class ChoiceUse:
    """One choice's meeting with the cache. `use` is None if it ended before it first ran; `places`
    says where in the chat its prompt's `diverged_at` are, as far as that can be told."""

    choice: int
    prompt: int
    prompt_tokens: int
    use: CacheUse | None
    places: Mapping[int, Place]
    receipts: tuple[Receipt, ...] = ()


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that reached a replica. `ended` is a Unix time in seconds; `replica` where it was
    last, several names if its choices were apart; `receipts` are those of a request that a remote
    server answered, which has no choices here."""

    request_id: str
    ended: float
    tenant: str
    model: str
    replica: str
    endpoint: str
    choices: tuple[ChoiceUse, ...]
    receipts: tuple[Receipt, ...] = ()


class RecentRequests:
    """A ring of `REMEMBERED` requests, or fewer where they have very many receipts. Used from the
    event loop only.

    Clients choose request ids, so one id may stand for several requests, of several tenants even.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._receipts = 0
        self._ring: deque[RecentRequest] = deque()
        self._by_id: dict[str, list[RecentRequest]] = {}
        self._openers: dict[str, frozenset[int]] = {}

    def note(self, request: Request) -> None:
        """Remember a request that is over; one that never reached a replica leaves no trace.

        Cheap: the cost is in the tokens of a prompt that diverged, some ten nanoseconds each.
        """
        tenant, model = request.tenant, request.model
        receipts = request.receipts()
        if tenant is None or model is None or not receipts:
            return
        ended_on = receipts[-1:] if request.relayed else [c.receipts[-1] for c in request.choices]
        recent = RecentRequest(
            request_id=request.call.request_id,
            ended=time.time(),
            tenant=tenant.id,
            model=model.name,
            replica=", ".join(dict.fromkeys(receipt.candidate.name for receipt in ended_on)),
            endpoint=request.endpoint,
            choices=self._choices(request, model) if isinstance(model, ServedModel) else (),
            receipts=tuple(receipts) if request.relayed else (),
        )
        self._ring.append(recent)
        self._by_id.setdefault(recent.request_id, []).append(recent)
        self._receipts += _receipts_of(recent)
        most_receipts = _RECEIPTS_EACH * self._remembered
        while len(self._ring) > self._remembered or (
            self._receipts > most_receipts and len(self._ring) > 1
        ):
            self._forget(self._ring.popleft())

    def find(self, request_id: str) -> tuple[RecentRequest, ...]:
        """The remembered requests of this id, the latest first."""
        return tuple(reversed(self._by_id.get(request_id, ())))

    def _forget(self, recent: RecentRequest) -> None:
        """The oldest of all is the oldest of its id."""
        self._receipts -= _receipts_of(recent)
        same = self._by_id[recent.request_id]
        same.pop(0)
        if not same:
            del self._by_id[recent.request_id]

    def _choices(self, request: Request, model: ServedModel) -> tuple[ChoiceUse, ...]:
        # the choices of one prompt diverge at the same places, mostly
        places: list[dict[int, Place]] = [{} for _ in request.prompts]
        for choice in request.choices:
            if choice.cache_use is not None:
                prompt = request.prompts[choice.prompt_index]
                self._add_places(places[choice.prompt_index], prompt, choice.cache_use, model)
        return tuple(
            ChoiceUse(
                choice=choice.index,
                prompt=choice.prompt_index,
                prompt_tokens=len(request.prompts[choice.prompt_index].token_ids),
                use=choice.cache_use,
                places=places[choice.prompt_index],
                receipts=tuple(choice.receipts),
            )
            for choice in request.choices
        )

    def _add_places(
        self, places: dict[int, Place], prompt: Prompt, use: CacheUse, model: ServedModel
    ) -> None:
        if prompt.messages is None:
            return
        for run in use.runs:
            if run.diverged_at is not None and run.diverged_at not in places:
                openers = self._openers_of(model)
                place = locate(prompt.token_ids, run.diverged_at, prompt.messages, openers)
                if place is not None:
                    places[run.diverged_at] = place

    def _openers_of(self, model: ServedModel) -> frozenset[int]:
        openers = self._openers.get(model.name)
        if openers is None:
            openers = self._openers[model.name] = turn_openers(model)
        return openers


def _receipts_of(recent: RecentRequest) -> int:
    return len(recent.receipts) + sum(len(choice.receipts) for choice in recent.choices)
