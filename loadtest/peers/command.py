"""`python -m loadtest.peers`: install other servers, keep one running, measure them beside forebay.

Exit codes: 0 all went well, 1 something could not be installed, started or measured, or a request
was not answered whole, 2 wrong use.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
import typer
import uvloop

from loadtest.bench.campaign import CampaignError, Report
from loadtest.bench.report import figures, leads, notes
from loadtest.bench.workloads import STANDARD, Workload
from loadtest.forebay_server import MODEL
from loadtest.machine import describe_machine
from loadtest.peers.catalog import ENGINES, ROUTERS, peer_named
from loadtest.peers.install import install, installed
from loadtest.peers.place import PeerError, default_root
from loadtest.peers.relaying import RelayFigure, compare_routers, relay_table
from loadtest.peers.running import running_peer
from loadtest.peers.side_by_side import compare_engine
from loadtest.peers.weights import bundled_gguf
from loadtest.peers.workshop import Workshop
from loadtest.tables import Table
from loadtest.wire.connection import Endpoint

_T = TypeVar("_T")

KEY_VARIABLE = "LOADTEST_PEER_KEY"
"""The key that a served engine asks for. A router passes on what its clients send."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Other servers beside forebay, on the same machine: " + ", ".join((*ENGINES, *ROUTERS)),
)

_Into = Annotated[
    Path | None,
    typer.Option(help="Where peers are installed; a directory of the user's cache by default."),
]


@app.command("install")
def install_peers(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Which ones.")],
    into: _Into = None,
) -> None:
    """Install peers from the package registry that pip is configured for. What is there already is
    left as it is; what was interrupted goes on."""
    root = into or default_root()
    try:
        for name in names:
            peer = peer_named(name)
            place = install(peer, root, _tell)
            if name in ENGINES:
                ENGINES[name].prepare(Workshop(place, _tell), bundled_gguf())
    except CampaignError as error:
        _stop(str(error))


@app.command()
def serve(
    name: Annotated[str, typer.Argument(help="Which one.")],
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Of 127.0.0.1.")],
    model: Annotated[
        Path | None, typer.Option(help="An engine's model; the bundled one by default.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="An engine's; all cores.")] = None,
    upstream: Annotated[
        list[str] | None, typer.Option(help="Such as http://127.0.0.1:8000/v1; a router's, each.")
    ] = None,
    into: _Into = None,
) -> None:
    """Keep one peer running until Ctrl-C. LOADTEST_PEER_KEY, if it is set, is the key that an
    engine asks for."""
    try:
        upstreams = [Endpoint.parse(url) for url in upstream or ()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        code = _finished(_serve(name, port, model, threads, upstreams, into))
    except KeyboardInterrupt:
        return  # As it is meant to end.
    _stop(f"{name} ended with code {code}")


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Engines and routers.")],
    workloads: Annotated[
        str, typer.Option(help="Of the engines: names, separated by commas.")
    ] = "W1,W2,W3,W4",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each workload.")] = 3,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the prompts.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write every figure to this file.")
    ] = None,
    into: _Into = None,
) -> None:
    """Measure forebay beside peers: engines one after the other under the workloads, routers all
    together in front of a stub."""
    chosen = _chosen(workloads)
    for name in names:
        _known(name)
    try:
        # Before anything is measured: what is missing should not be found out after the first hour.
        for name in names:
            installed(peer_named(name), into or default_root())
    except PeerError as error:
        _stop(str(error))
    if seed is None:
        seed = secrets.randbelow(1 << 32)
        _tell(f"seed {seed}")
    machine = describe_machine()
    typer.echo("\n".join(machine))
    beside: dict[str, list[Report]] = {}
    relaying: list[RelayFigure] = []
    try:
        for name in (one for one in dict.fromkeys(names) if one in ENGINES):
            reports = _finished(
                compare_engine(name, chosen, repeats=repeats, seed=seed, root=into, tell=_tell)
            )
            beside[name] = reports
            _print(figures(reports, chosen), markdown)
            for line in notes(reports):
                typer.echo(line)
        if routers := [one for one in dict.fromkeys(names) if one in ROUTERS]:
            relaying = _finished(compare_routers(routers, root=into, tell=_tell))
            _print(relay_table(relaying), markdown)
    finally:
        # What has been found is kept, also when the next peer fails.
        if json_path is not None:
            _write(json_path, _document(machine, chosen, beside, relaying))
    if any(report.failures for reports in beside.values() for report in reports):
        raise typer.Exit(1)


def main() -> None:
    """The command. SIGTERM and a closed terminal end it like Ctrl-C: what it started ends too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    app(prog_name="python -m loadtest.peers")


async def _serve(
    name: str,
    port: int,
    model: Path | None,
    threads: int | None,
    upstreams: list[Endpoint],
    into: Path | None,
) -> int:
    async with running_peer(
        name,
        model_path=model,
        threads=threads,
        key=os.environ.get(KEY_VARIABLE) if name in ENGINES else None,
        upstreams=upstreams,
        port=port,
        root=into,
        to_terminal=True,
        tell=_tell,
    ) as peer:
        at = peer.target.endpoint
        _tell(
            f"{name} serves {MODEL if name in ENGINES else 'its upstreams'} at "
            f"http://{at.host}:{at.port}{at.base_path} (process {peer.pid}); Ctrl-C ends it"
        )
        return await peer.ended()


def _finished(work: Coroutine[Any, Any, _T]) -> _T:
    try:
        return uvloop.run(work)
    except CampaignError as error:
        _stop(str(error))


def _known(name: str) -> None:
    try:
        peer_named(name)
    except PeerError as error:
        raise typer.BadParameter(str(error)) from None


def _chosen(names: str) -> list[Workload]:
    chosen = []
    for name in names.split(","):
        workload = STANDARD.get(name.strip().upper())
        if workload is None:
            raise typer.BadParameter(f"{name}: no such workload; there are {', '.join(STANDARD)}")
        chosen.append(workload)
    return chosen


def _document(
    machine: list[str],
    workloads: list[Workload],
    beside: dict[str, list[Report]],
    relaying: list[RelayFigure],
) -> dict[str, object]:
    return {
        "machine": machine,
        "workloads": workloads,
        "beside": {
            name: {"reports": reports, "leads": leads(reports, workloads)}
            for name, reports in beside.items()
        },
        "relaying": relaying,
    }


def _print(table: Table, markdown: bool) -> None:
    typer.echo(f"\n{table.markdown() if markdown else table.text()}\n")


def _write(path: Path, document: object) -> None:
    try:
        path.write_bytes(
            orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        )
    except OSError as error:
        _stop(f"{path}: cannot be written ({error.strerror})")


def _tell(line: str) -> None:
    typer.echo(line, err=True)


def _stop(line: str) -> NoReturn:
    typer.echo(f"loadtest.peers: {line}", err=True)
    raise typer.Exit(1)
