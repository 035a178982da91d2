"""`forebay usage`: what tenants of a running server have used, and how they fared."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from gateway.cli.operator_call import AsJson, Key, Url, answered, ask, show_rows, understood
from gateway.cli.server_call import DEFAULT_URL
from gateway.ledger.group_by import GroupBy

_NOTHING = "-"
_NAMES = ("tenant", "model", "key", "service_class", "start")
_COLUMNS = (
    "requests",
    "prompt",
    "cached",
    "output",
    "USD",
    "attainment",
    "goodput/s",
    "TTFT ms p50",
    "TTFT p95",
    "TTFT p99",
    "TPOT ms p50",
    "TPOT p95",
)

Start = Annotated[
    str | None, typer.Option(help="Unix seconds, a date, or RFC 3339; 24 hours before the end.")
]
End = Annotated[str | None, typer.Option(help="The same; now.")]
OneTenant = Annotated[str | None, typer.Option(help="Only this one's.")]


def usage(
    tenant: OneTenant = None,
    by: Annotated[GroupBy, typer.Option(help="hour and day are those of UTC.")] = GroupBy.MODEL,
    start: Start = None,
    end: End = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Say what tenants used, what it cost, and how promises were kept."""
    params = asked_for(tenant=tenant, start=start, end=end, group_by=by)
    response = ask("GET", "/admin/usage", url, key, params=params)
    answer = answered(response, "data")
    if as_json:
        typer.echo(response.text)
        return
    with understood(response):
        groups = answer["data"]
        names = [name for name in _NAMES if any(name in group for group in groups)]
        rows = [[*(_name(group, name) for name in names), *_figures(group)] for group in groups]
        if answer["total"] is not None and len(groups) > 1:
            rows.append(["all", *("" for _ in names[1:]), *_figures(answer["total"])])
        show_rows((*names, *_COLUMNS), rows, figures=len(_COLUMNS))


def asked_for(**params: str | None) -> dict[str, str]:
    """A query string's parameters, without those that were not given."""
    return {name: value for name, value in params.items() if value is not None}


def _name(group: Mapping[str, Any], name: str) -> str:
    value = group.get(name, "")
    if name == "start" and isinstance(value, int | float):
        value = f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M}"
    return str(value)


def _figures(group: Mapping[str, Any]) -> list[str]:
    slo, ttft, tpot = group["slo"], group["latency_ms"]["ttft"], group["latency_ms"]["tpot"]
    prompt, cached = group["prompt_tokens"], group["cached_tokens"]["total"]
    attainment = slo["attainment"]
    return [
        f"{group['requests']['total']:,}",
        f"{prompt:,}",
        f"{cached / prompt:.0%}" if prompt else _NOTHING,
        f"{group['output_tokens']:,}",
        str(group["cost_usd"]),
        _NOTHING if attainment is None else f"{attainment:.2%}",
        f"{slo['goodput_rps']:.3g}",
        *(_ms(ttft, name) for name in ("p50", "p95", "p99")),
        *(_ms(tpot, name) for name in ("p50", "p95")),
    ]


def _ms(percentiles: Mapping[str, float] | None, name: str) -> str:
    return _NOTHING if percentiles is None else f"{percentiles[name]:,.1f}"
