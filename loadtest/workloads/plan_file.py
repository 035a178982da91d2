"""A plan in a YAML file: several tenants, each with its own traffic and promise.

    title: an agent beside a neighbour        # optional
    seed: 7                                   # optional; unset: whatever the run is given
    tenants:
      - name: quiet
        key_env: QUIET_KEY                    # the variable with its key; unset: the target's own
        class: interactive                    # interactive | standard | batch
        weight: 2
        slo: {ttft_ms: 500, tpot_ms: 120, target: 0.95}
        workload: agent
        parameters: {steps: 4}
        arrivals: {pattern: poisson, rate: 0.5}   # constant | poisson | gamma (with cv)
        seconds: 60                           # or requests: 30
      - name: busy
        workload: unique
        arrivals: {pattern: gamma, rate: 4, cv: 3}
        seconds: 60

With `concurrency: 8` beside `tenants` it is a closed loop: so many clients send all tenants'
sessions, mixed evenly, and tenants have `requests` and no arrivals. Workloads that were recorded
need no arrivals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from loadtest.plan import Load, Session, TenantPlan
from loadtest.traces.reading import SHIPPED
from loadtest.vocabulary import DEFAULT_VOCABULARY, Vocabulary
from loadtest.workloads.arrivals import Arrivals, Closed, arrivals_of
from loadtest.workloads.base import Workload
from loadtest.workloads.building import chosen_sessions, limited
from loadtest.workloads.mistakes import mistakes_of
from loadtest.workloads.randomness import derived_seed
from loadtest.workloads.registry import WORKLOADS, make_workload
from loadtest.workloads.strict_yaml import read_tree
from policies.service_class import ServiceClass
from policies.slo import Slo

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class _SloSection(_Section):
    """See `policies.slo.Slo`."""

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    target: float = Field(default=0.95, gt=0, lt=1)

    def as_slo(self) -> Slo:
        return Slo(_seconds(self.ttft_ms), _seconds(self.tpot_ms), self.target)


class _ArrivalsSection(_Section):
    """See `loadtest.workloads.arrivals.Open`."""

    pattern: Literal["constant", "poisson", "gamma"]
    rate: float = Field(gt=0)
    cv: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        arrivals_of(self.pattern, rate=self.rate, cv=self.cv)
        return self

    def as_arrivals(self, speed: float) -> Arrivals:
        return arrivals_of(self.pattern, rate=self.rate * speed, cv=self.cv)


class _TenantSection(_Section):
    """See `loadtest.plan.TenantPlan`, and the head of this file."""

    name: str = Field(min_length=1)
    key_env: str | None = None
    service_class: ServiceClass = Field(default=ServiceClass.STANDARD, alias="class")
    weight: float = Field(default=1.0, gt=0)
    slo: _SloSection = _SloSection()
    workload: str
    parameters: Mapping[str, Any] = {}
    arrivals: _ArrivalsSection | None = None
    requests: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, gt=0)

    @field_validator("workload")
    @classmethod
    def _is_a_workload(cls, value: str) -> str:
        if value not in WORKLOADS:
            raise ValueError(f"must be one of {', '.join(WORKLOADS)}")
        return value

    @field_validator("key_env")
    @classmethod
    def _is_a_variable(cls, value: str | None) -> str | None:
        if value is not None and not _VARIABLE.fullmatch(value):
            raise ValueError("must be the name of an environment variable")
        return value

    def as_tenant(self) -> TenantPlan:
        return TenantPlan(
            self.name, self.key_env, self.slo.as_slo(), self.service_class, self.weight
        )


class _File(_Section):
    title: str | None = None
    seed: int | None = Field(default=None, ge=0)
    concurrency: int | None = Field(default=None, ge=1)
    tenants: tuple[_TenantSection, ...]

    @field_validator("tenants")
    @classmethod
    def _are_some(cls, value: tuple[_TenantSection, ...]) -> tuple[_TenantSection, ...]:
        # Not a length of the field's: that would count only those without a mistake.
        if not value:
            raise ValueError("must not be empty")
        return value


class Plan:
    """A file that was read and found right."""

    def __init__(self, file: _File, name: str, workloads: Sequence[Workload]) -> None:
        self._file = file
        self._name = name
        self._workloads = workloads

    @property
    def seed(self) -> int | None:
        """The one that the file says."""
        return self._file.seed

    def check_speeds(self) -> None:
        """Raises ValueError if runs at other speeds would not be as long: in a closed loop, and
        with tenants who send so many requests and no more."""
        if self._file.concurrency is not None:
            raise ValueError(f"{self._name}: concurrency: a closed loop has no rate")
        for index, tenant in enumerate(self._file.tenants):
            if tenant.seconds is None or tenant.requests is not None:
                raise ValueError(
                    f"{self._name}: tenants[{index}].seconds: is needed, and no requests: at "
                    "another rate, so many would take another time"
                )

    def warm_up(self, seed: int, requests: int, vocabulary: Vocabulary) -> list[Session]:
        """The first sessions with so many requests; none whose texts are the same for any seed."""
        repeated = {
            tenant.name
            for tenant, workload in zip(self._file.tenants, self._workloads, strict=True)
            if not workload.ever_new
        }
        sessions = self.load(seed=seed, vocabulary=vocabulary).sessions
        return list(limited((each for each in sessions if each.tenant not in repeated), requests))

    def load(
        self,
        *,
        seed: int | None = None,
        speed: float = 1.0,
        vocabulary: Vocabulary = DEFAULT_VOCABULARY,
    ) -> Load:
        """What is sent. `seed` None is the file's, or 0; two tenants share no prompt. `speed`
        multiplies every rate, the pace of recorded times included.

        Raises ValueError for a speed that is not positive, or is not 1 in a closed loop, and what
        the workloads raise.
        """
        if speed <= 0:
            raise ValueError(f"speed must be more than 0, not {speed}")
        if self._file.concurrency is not None and speed != 1.0:
            raise ValueError("speed: a closed loop has no rate")
        seed = (self._file.seed or 0) if seed is None else seed
        parts = [
            self._sessions(tenant, workload, derived_seed(seed, tenant.name), speed, vocabulary)
            for tenant, workload in zip(self._file.tenants, self._workloads, strict=True)
        ]
        concurrency = self._file.concurrency
        in_turn = _by_time(parts) if concurrency is None else _evenly(parts)
        pace = "each at its rate" if concurrency is None else str(Closed(concurrency))
        what = self._file.title or ", ".join(
            f"{tenant.name}: {workload.title()}"
            for tenant, workload in zip(self._file.tenants, self._workloads, strict=True)
        )
        return Load(
            title=f"{self._name}: {what}; {pace}; seed {seed}",
            sessions=in_turn,
            tenants=tuple(tenant.as_tenant() for tenant in self._file.tenants),
            concurrency=concurrency,
        )

    def _sessions(
        self,
        tenant: _TenantSection,
        workload: Workload,
        seed: int,
        speed: float,
        vocabulary: Vocabulary,
    ) -> list[Session]:
        """Those of one tenant. Recorded times are sped up here, drawn ones by their rate."""
        arrivals = None if tenant.arrivals is None else tenant.arrivals.as_arrivals(speed)
        recorded = speed if arrivals is None else 1.0
        chosen = chosen_sessions(
            workload,
            arrivals,
            requests=tenant.requests,
            seconds=tenant.seconds and tenant.seconds * recorded,
            seed=seed,
            vocabulary=vocabulary,
        )
        return [
            replace(session, tenant=tenant.name, start_s=session.start_s / recorded)
            for session in chosen
        ]


def read_plan(path: Path) -> Plan:
    """The plan in a file; relative files in it lie beside it. Raises ValueError with all that is
    wrong, one line per mistake, each naming file and field."""
    tree = read_tree(path)
    file: _File | None = None
    mistakes: list[str] = []
    try:
        file = _File.model_validate(tree)
    except ValidationError as error:
        mistakes += mistakes_of(error)
    workloads: list[Workload] = []
    names: set[str] = set()
    for index, given in _given_tenants(tree):
        found: list[str] = []
        workload = None
        try:
            workload = _workload(given, path.parent)
        except ValueError as error:
            found += str(error).splitlines()
        if workload is not None:
            workloads.append(workload)
        found += _pace_mistakes(given, workload, closed=_is_closed(tree))
        name = given.get("name")
        if isinstance(name, str):
            if name in names:
                found.append("name: another tenant has it")
            names.add(name)
        mistakes += [f"tenants[{index}].{line}" for line in found]
    if file is None or mistakes:
        raise ValueError("\n".join(f"{path}: {line}" for line in mistakes))
    return Plan(file, path.name, workloads)


def _given_tenants(tree: object) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """As they stand in the file, whatever is wrong with some of their fields."""
    tenants = tree.get("tenants") if isinstance(tree, dict) else None
    for index, given in enumerate(tenants if isinstance(tenants, list) else ()):
        if isinstance(given, dict):
            yield index, given


def _is_closed(tree: object) -> bool:
    return isinstance(tree, dict) and tree.get("concurrency") is not None


def _workload(given: Mapping[str, Any], directory: Path) -> Workload | None:
    """A tenant's; None if the fields that say it are no name and no parameters, which is told
    elsewhere. Raises ValueError for what is wrong with the parameters."""
    name, parameters = given.get("workload"), given.get("parameters", {})
    if not isinstance(name, str) or name not in WORKLOADS or not isinstance(parameters, dict):
        return None
    file = parameters.get("file")
    if isinstance(file, str) and file not in SHIPPED:
        parameters = parameters | {"file": str(directory / file)}  # an absolute one stays as it is
    try:
        return make_workload(name, parameters)
    except ValueError as error:
        lines = str(error).splitlines()
        raise ValueError("\n".join(f"parameters: {line}" for line in lines)) from None


def _pace_mistakes(
    given: Mapping[str, Any], workload: Workload | None, *, closed: bool
) -> Iterator[str]:
    """What does not fit the plan or the workload (None: it is not known)."""
    arrivals = given.get("arrivals")
    if closed:
        if arrivals is not None:
            yield "arrivals: the plan is a closed loop (concurrency), which has none"
        if given.get("seconds") is not None:
            yield "seconds: the plan is a closed loop (concurrency): say how many requests"
    elif arrivals is None and workload is not None and workload.usual_arrivals is not None:
        yield "arrivals: is required, unless the plan has a concurrency"


def _by_time(parts: Iterable[Sequence[Session]]) -> list[Session]:
    return sorted(chain.from_iterable(parts), key=lambda session: session.start_s)


def _evenly(parts: Iterable[Sequence[Session]]) -> list[Session]:
    """Mixed so that at every point about the same share of each part has been sent."""
    placed = [
        ((index + 0.5) / len(part), session) for part in parts for index, session in enumerate(part)
    ]
    return [session for _, session in sorted(placed, key=lambda pair: pair[0])]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
