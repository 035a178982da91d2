"""The workloads by name, made of names and values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import ValidationError

from loadtest.workloads.agent import Agent
from loadtest.workloads.base import Workload
from loadtest.workloads.mistakes import mistakes_of
from loadtest.workloads.multi_turn import MultiTurn
from loadtest.workloads.rag import Rag
from loadtest.workloads.recorded import Chats, TraceReplay
from loadtest.workloads.shared_prompts import SharedPrompts
from loadtest.workloads.standard import StandardW1, StandardW2, StandardW3, StandardW4
from loadtest.workloads.unique import MixedLengths, Unique

_ALL: tuple[type[Workload], ...] = (
    *(StandardW1, StandardW2, StandardW3, StandardW4),
    *(SharedPrompts, MultiTurn, Rag, Agent, Unique, MixedLengths, TraceReplay, Chats),
)
WORKLOADS: Mapping[str, type[Workload]] = {workload.name: workload for workload in _ALL}


class Parameter(NamedTuple):
    """One of a workload's; `default` None: it is unset, or has to be given if `required`."""

    name: str
    default: object
    description: str
    required: bool = False


def make_workload(name: str, parameters: Mapping[str, object] | None = None) -> Workload:
    """The workload of this name; values may be texts, as from a command line. Raises ValueError,
    one line per mistake, that names what there is instead."""
    workload = WORKLOADS.get(name)
    if workload is None:
        raise ValueError(f"no workload {name}; there are {', '.join(WORKLOADS)}")
    parameters = parameters or {}
    known = workload.model_fields
    if unknown := [each for each in parameters if each not in known]:
        has = f"has {', '.join(known)}" if known else "has no parameters"
        raise ValueError("\n".join(f"{each}: unknown parameter; {name} {has}" for each in unknown))
    try:
        return workload.model_validate(dict(parameters))
    except ValidationError as error:
        raise ValueError("\n".join(mistakes_of(error))) from None


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """What may be set of the workload of this name; raises KeyError for another."""
    return tuple(
        Parameter(
            field,
            None if info.is_required() else info.default,
            info.description or "",
            info.is_required(),
        )
        for field, info in WORKLOADS[name].model_fields.items()
    )


def parse_settings(settings: Iterable[str]) -> dict[str, str]:
    """`["groups=4", "zipf=1"]` as names and values; raises ValueError for what is no such pair, and
    for a name that comes twice."""
    parsed: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ValueError(f"{setting}: must be name=value")
        if name in parsed:
            raise ValueError(f"{name}: is given twice")
        parsed[name] = value.strip()
    return parsed
