"""`loadtest simulate`: what would become of a load on a fleet that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import orjson
import typer
import yaml

from loadtest.bench.campaign import CampaignError
from loadtest.cli import options
from loadtest.cli.errors import finished, mistakes, say
from loadtest.cli.results import check_writable, keep
from loadtest.cli.wanted import Pace, slo_of, this_command, wanted
from loadtest.machine import describe_machine
from loadtest.simulate.hardware import KINDS, ReplicaKind, given_cost
from loadtest.simulate.overlay import overlaid
from loadtest.simulate.result import SimResult, as_json
from loadtest.simulate.simulation import simulate as run_simulation
from loadtest.simulate.spec import SimSpec, Split
from loadtest.tables import Table, number, percent
from loadtest.trace import Trace
from loadtest.traces.chaining import trace_of
from loadtest.traces.reading import read_trace
from loadtest.traces.scaling import Scale, scaled
from loadtest.wire.connection import Endpoint, fetch
from policies.batching import Batching, BatchingMode
from policies.slo import Slo

_T = TypeVar("_T")
_ADMIN_KEY = "FOREBAY_ADMIN_KEY"


class _Question(NamedTuple):
    """One combination of what was given several values: what tables call it, and the fleet."""

    name: str
    spec: SimSpec


def simulate(
    trace_path: Annotated[
        str | None,
        typer.Option("--trace", help="A recording; mooncake is the piece that is shipped."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="A workload in place of a recording.")
    ] = None,
    settings: options.Settings = None,
    plan: options.PlanFile = None,
    rate: options.Rate = None,
    cv: options.Cv = None,
    requests: options.Requests = None,
    seconds: options.Seconds = None,
    speed: Annotated[float, typer.Option(min=1e-3, help="Of a recording: 2 is twice as fast.")] = 1,
    length: Annotated[
        float, typer.Option(min=1e-4, help="Of a recording: prompts, answers, blocks this long.")
    ] = 1,
    copies: Annotated[
        int,
        typer.Option(min=1, help="So many times the traffic, with blocks of its own."),
    ] = 1,
    spread: Annotated[
        bool,
        typer.Option("--spread", help="Of a recording: what came at one tick, until the next."),
    ] = False,
    block_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a workload: what the cache keeps together; 16.")
    ] = None,
    replicas: Annotated[str, typer.Option(help="How many; several: 8,64,512.")] = "1",
    policy: Annotated[str, typer.Option(help="Of routing; several, separated by commas.")] = (
        "predicted-ttft"
    ),
    kind: Annotated[
        str,
        typer.Option(
            help=f"What a replica is: {', '.join(KINDS)}, a YAML or JSON file of coefficients, or "
            f"the URL of a forebay, whose first replica says it ({_ADMIN_KEY})."
        ),
    ] = "8b-h100",
    device_tokens: Annotated[
        str | None, typer.Option(help="Tokens of KV that a device holds; several: 100000,400000.")
    ] = None,
    dram_tokens: Annotated[str, typer.Option(help="The same of each replica's memory.")] = "0",
    redis_tokens: Annotated[str, typer.Option(help="The same of one Redis for all.")] = "0",
    prompt_cache: Annotated[
        bool, typer.Option("--prompt-cache/--no-prompt-cache", help="Whether anything is kept.")
    ] = True,
    step_tokens: Annotated[
        str | None, typer.Option(help="Tokens of a step at most: the chunk of a prompt; several.")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Sequences that a replica runs at once.")
    ] = None,
    batching: Annotated[str, typer.Option(help="continuous, dynamic, static; several.")] = (
        "continuous"
    ),
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Of static and dynamic batches; 8.")
    ] = None,
    window_ms: Annotated[
        float | None, typer.Option(min=0, help="How long a batch waits to be filled.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Replicas for prompts and for answers, 2:1; several: 2:1,1:1."),
    ] = None,
    admission: Annotated[
        bool, typer.Option("--admission", help="Refuse what would be too late.")
    ] = False,
    queue_ms: Annotated[
        float | None,
        typer.Option(min=1, help="With --admission: it waits so long for a better moment first."),
    ] = None,
    fair: Annotated[
        bool, typer.Option("--fair/--fifo", help="Shares by weight, or first come, first served.")
    ] = True,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Beside them all: one endless cache for all.")
    ] = False,
    report_delay_ms: Annotated[
        float, typer.Option(min=0, help="How old is what routing knows of loads and caches.")
    ] = 0,
    noise: Annotated[float, typer.Option(min=0, help="Of steps' times, relative.")] = 0,
    ttft_ms: options.TtftMs = None,
    tpot_ms: options.TpotMs = None,
    target: options.Share = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    as_object: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    html_path: options.Html = None,
    records: Annotated[
        Path | None, typer.Option(help="Write all records here, as `run --json` does.")
    ] = None,
    markdown: options.Markdown = False,
) -> None:
    """Send a recording or a workload through a simulated fleet, which decides as forebay does.

    What may be given several values is simulated in every combination. With --json there is one
    object: the figures, or with several combinations a list of them as "results".
    """
    with mistakes():
        check_writable(records, html_path)
        traffic = _traffic(
            trace_path,
            Scale(speed=speed, length=length, requests=requests, seconds=seconds, spread=spread),
            *(workload, settings or [], plan),
            Pace(None, rate, cv, None, requests, seconds),
            seed=seed,
            block_tokens=block_tokens,
        )
        if copies > 1:
            traffic = overlaid(traffic, copies, seed=seed)
        made_of = finished(_kind(kind)) if kind.startswith("http") else _given_kind(kind)
        slo = slo_of(ttft_ms, tpot_ms, target)
        if batching == BatchingMode.CONTINUOUS and (batch_size, window_ms) != (None, None):
            raise ValueError("--batch-size, --window-ms: are of static and dynamic batches")
        if queue_ms is not None:
            if not admission:
                raise ValueError("--queue-ms: says how --admission refuses")
            slo = _queueing(slo, queue_ms)
            queueing = [
                replace(each, slo=_queueing(each.slo, queue_ms)) for each in traffic.tenants
            ]
            traffic = replace(traffic, tenants=tuple(queueing))
        questions = list(
            _questions(
                SimSpec(
                    cost=made_of.cost,
                    device_tokens=made_of.device_tokens,
                    max_running=max_running or made_of.max_running,
                    prompt_cache=prompt_cache,
                    report_delay_s=report_delay_ms / 1e3,
                    directory_delay_s=report_delay_ms / 1e3,
                    admission=admission,
                    fair=fair,
                    slo=slo if slo.promises else None,
                    noise=noise,
                    seed=seed,
                ),
                {
                    "replicas": _several("replicas", replicas, _whole),
                    "policy": policy.split(","),
                    "device_tokens": _several("device-tokens", device_tokens, _whole),
                    "dram_tokens": _several("dram-tokens", dram_tokens, _whole),
                    "redis_tokens": _several("redis-tokens", redis_tokens, _whole),
                    "step_tokens": _several("step-tokens", step_tokens, _whole),
                    "split": _several("split", split, _split),
                    "batching": _several(
                        "batching",
                        batching,
                        lambda mode: _batching(mode, batch_size or 8, window_ms),
                    ),
                },
                oracle=oracle,
            )
        )
        results = [_simulated(traffic, each, this_command(seed)) for each in questions]
    if as_object:
        found = [{"name": each.run.name, **as_json(each)} for each in results]
        document: dict[str, Any] = found[0] if len(found) == 1 else {"results": found}
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    else:
        _show(traffic, results, slo, markdown=markdown)
    keep(
        [each.run for each in results],
        title=f"Simulated: {traffic.name}",
        json_path=records,
        html_path=html_path,
        keys=(),
    )


def _traffic(
    path: str | None,
    scale: Scale,
    workload: str | None,
    settings: Sequence[str],
    plan: Path | None,
    pace: Pace,
    *,
    seed: int,
    block_tokens: int | None,
) -> Trace:
    """Raises ValueError, OSError."""
    if sum(each is not None for each in (path, workload, plan)) != 1:
        raise ValueError("one of --trace, --workload and --plan says what is sent")
    if path is not None:
        if settings or pace.rate is not None or pace.cv is not None:
            raise ValueError("--set, --rate, --cv: a recording has its own; see --speed, --length")
        if block_tokens is not None:
            raise ValueError("--block-tokens: a recording has its own; see --length")
        found = scaled(read_trace(path), scale)
        if found.dropped or found.cut:
            say(f"{found.dropped} requests dropped and {found.cut} cut for their length")
        return found.trace
    if scale.speed != 1 or scale.length != 1 or scale.spread:
        raise ValueError("--speed, --length, --spread: are for a recording")
    what = wanted(
        *(workload, settings, plan, pace, Slo()),
        seed=seed,
        vocabulary=48_000,
        warm_up=0,
    )
    load = what.load()
    if load.concurrency is not None:
        raise ValueError(
            "a closed loop cannot be simulated, as nobody here waits for an answer before asking "
            "again: give a --rate, or a plan's tenants theirs"
        )
    return trace_of(load, block_tokens or 16)


def _given_kind(kind: str) -> ReplicaKind:
    """Raises ValueError, OSError."""
    if kind in KINDS:
        return KINDS[kind]
    if not kind.endswith((".yaml", ".yml", ".json")):
        raise ValueError(f"--kind: is one of {', '.join(KINDS)}, a .yaml or .json file, or a URL")
    try:
        values = yaml.safe_load(Path(kind).read_text(encoding="utf-8"))
    except yaml.YAMLError:
        raise ValueError(f"{kind}: is no valid YAML or JSON") from None
    if not isinstance(values, dict):
        raise ValueError(f"{kind}: must hold names and values")
    max_running, device_tokens = values.pop("max_running", None), values.pop("device_tokens", None)
    for name, value in (("max_running", max_running), ("device_tokens", device_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{kind}: {name} must be a whole number of 1 or more")
    return ReplicaKind(given_cost(values), max_running, device_tokens)


async def _kind(url: str) -> ReplicaKind:
    """What the first replica of a running forebay is like; the room of its device is not told, and
    taken to be that of the bundled model. Raises CampaignError."""
    key = os.environ.get(_ADMIN_KEY)
    if not key:
        raise CampaignError(f"--kind: {_ADMIN_KEY} is not set")
    answer = await fetch(Endpoint.parse(url, key), "GET", "/admin/replicas")
    if answer.status != 200:
        raise CampaignError(f"{url}: asked for its replicas it answered {answer.status}")
    try:
        first = orjson.loads(answer.body)["replicas"][0]
        cost = given_cost(first["coefficients"])
        max_running = int(first["max_running"])
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        raise CampaignError(f"{url}: does not say what work takes there") from None
    return ReplicaKind(cost, max_running, KINDS["bundled-cpu"].device_tokens)


def _several(name: str, text: str | None, parse: Callable[[str], _T]) -> list[_T | None]:
    """Values separated by commas; [None] for none. Raises ValueError."""
    if text is None:
        return [None]
    try:
        return [parse(each.strip()) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--{name}: {error}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{text or 'nothing'} is no whole number; give one, or several as in 8,64"
        ) from None


def _queueing(slo: Slo, queue_ms: float) -> Slo:
    return replace(slo, on_overload="queue", max_queue_s=queue_ms / 1e3)


def _split(text: str) -> Split:
    prefill, colon, decode = text.partition(":")
    if not colon or not prefill.isdigit() or not decode.isdigit():
        raise ValueError(f"{text} is no such thing as 2:1")
    return Split(int(prefill), int(decode))


def _batching(mode: str, size: int, window_ms: float | None) -> Batching:
    if mode not in [each.value for each in BatchingMode]:
        raise ValueError(f"{mode} is none of {', '.join(BatchingMode)}")
    return Batching(BatchingMode(mode), size, None if window_ms is None else window_ms / 1e3)


def _questions(base: SimSpec, axes: dict[str, list[Any]], *, oracle: bool) -> Iterator[_Question]:
    """Every combination; names say what differs. Raises ValueError for one that is none."""
    several = [name for name, values in axes.items() if len(values) > 1]
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        chosen = {name: value for name, value in values.items() if value is not None}
        said = ", ".join(_said(name, values[name]) for name in several)
        step_tokens = chosen.pop("step_tokens", None)
        if step_tokens is not None:
            chosen["cost"] = base.cost._replace(step_tokens=step_tokens)
        parts: Split | None = chosen.get("split")
        if parts is not None:
            # a split is a ratio: so many replicas are divided by it
            share, rest = divmod(chosen["replicas"], parts.prefill + parts.decode)
            if rest or not share:
                raise ValueError(
                    f"--split: {chosen['replicas']} replicas cannot be divided "
                    f"{parts.prefill}:{parts.decode}"
                )
            chosen["split"] = replace(
                parts, prefill=share * parts.prefill, decode=share * parts.decode
            )
        spec = replace(base, **chosen)
        yield _Question(said or spec.policy, spec)
        if oracle and spec.policy == axes["policy"][0]:
            endless = replace(spec, policy="predicted-ttft", oracle=True)
            others = [_said(name, values[name]) for name in several if name != "policy"]
            yield _Question(", ".join([*others, "endless cache"]), endless)


def _said(name: str, value: Any) -> str:
    if isinstance(value, Split):
        return f"{value.prefill}:{value.decode}"
    if isinstance(value, Batching):
        return value.mode.value
    return str(value) if name == "policy" else f"{value:,} {name.replace('_', ' ')}"


def _simulated(traffic: Trace, question: _Question, command: str) -> SimResult:
    say(f"simulating {question.name}")
    found = run_simulation(traffic, question.spec, tell=say)
    run = replace(found.run, name=question.name, command=command, machine=tuple(describe_machine()))
    return replace(found, run=run)


def _show(traffic: Trace, results: Sequence[SimResult], slo: Slo, *, markdown: bool) -> None:
    headers = (
        *("simulated", "hit rate", "TTFT p50 ms", "p95", "TPOT p50 ms", "p95"),
        *("goodput /s", "kept", "output tok/s", "busy"),
    )
    table = Table(headers, tuple(_row(each) for each in results))
    first = results[0]
    typer.echo(f"{traffic.name}: {len(traffic.requests):,} requests")
    typer.echo(table.markdown() if markdown else table.text())
    typer.echo(
        f"one endless cache for all would have {first.ideal_hit_rate:.1%} of the blocks; "
        f"{first.simulated_s:,.0f} s took {sum(each.wall_s for each in results):,.1f} s to simulate"
    )
    if not any(tenant.slo.promises for tenant in first.run.tenants) and not slo.promises:
        typer.echo("nobody was promised anything: goodput counts all answers")


def _row(result: SimResult) -> tuple[str, ...]:
    figures = as_json(result)
    ttft, tpot = figures["ttft_ms"] or {}, figures["tpot_ms"] or {}
    return (
        result.run.name,
        percent(figures["hit_rate"]),
        *(number(each.get(share)) for each in (ttft, tpot) for share in ("p50", "p95")),
        number(figures["goodput_rps"]),
        percent(figures["attainment"]),
        number(figures["output_tokens_per_s"]),
        f"{figures['utilization']['mean']:.0%}",
    )
