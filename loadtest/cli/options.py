"""The options that several commands have, as typer wants them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loadtest.cli.wanted import USUAL_WORKLOAD

DEFAULT_SERVER = "http://127.0.0.1:8000/v1"

Key = Annotated[
    str | None,
    typer.Option(
        envvar="FOREBAY_API_KEY",
        help="API key; else the demo key where it opens a server of this machine.",
        show_envvar=True,
    ),
]
Model = Annotated[str | None, typer.Option(help="The model; the first one listed if left out.")]
WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        help=f"Its name; `loadtest workloads` shows them. {USUAL_WORKLOAD} if left out.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="A parameter of the workload."),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="A plan of several tenants (YAML) in place of a workload."),
]
Arrivals = Annotated[
    str | None,
    typer.Option(help="closed, constant, poisson or gamma; by default what the options tell."),
]
Rate = Annotated[float | None, typer.Option(min=1e-6, help="Sessions begun per second.")]
Cv = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=100,
        help="Of gamma arrivals: standard deviation over mean; above 1 is bursty.",
    ),
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="A closed loop of so many clients instead of a rate.")
]
Requests = Annotated[int | None, typer.Option(min=1, help="How many are sent.")]
Seconds = Annotated[float | None, typer.Option(min=0.1, help="For how long they are sent.")]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Of prompts and times. A server's cache knows those of earlier runs."),
]
Vocabulary = Annotated[
    int, typer.Option(min=1024, help="Prompts use token ids from 256 to below this.")
]
WarmUp = Annotated[int, typer.Option(min=0, help="Requests before it counts, with other prompts.")]
TtftMs = Annotated[
    float | None, typer.Option("--ttft-ms", min=0.1, help="Promised: first token within.")
]
TpotMs = Annotated[
    float | None, typer.Option("--tpot-ms", min=0.1, help="Promised: mean time between tokens.")
]
Share = Annotated[
    float | None,
    typer.Option(
        "--target",
        min=0.01,
        max=0.9999,
        help="The share for which it has to hold; 0.95 if not set.",
    ),
]
PriceText = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="input=…,cached_input=…,output=…",
        help="USD per million tokens, for servers that do not say what they charge.",
    ),
]
UsdPerHour = Annotated[float | None, typer.Option(min=0, help="What the server's machine costs.")]
Timeout = Annotated[float, typer.Option("--timeout-s", min=1, help="For a whole answer.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the report here, as one page.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all records and figures here (.gz: packed).")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
