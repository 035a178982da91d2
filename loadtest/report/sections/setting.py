"""What was run, on what, when and how to run it again."""

from __future__ import annotations

from loadtest.record import ClientHealth
from loadtest.report.blocks import group, lines, terms
from loadtest.report.labels import Shown
from loadtest.report.markup import Html, element
from loadtest.report.quantities import count, duration, moment, percent, usd


def setting(shown: Shown) -> Html:
    """All that is needed to repeat the run."""
    run, whole = shown.run, shown.summary.whole
    about = [
        ("kind", "live, against a server" if run.kind == "live" else "simulated"),
        ("target", run.target),
        ("workload", run.workload),
        ("began", moment(run.began_at)),
        ("took", duration(run.wall_s * 1e3)),
        (
            "requests",
            f"{count(whole.requests)}, with {count(whole.prompt_tokens)} prompt tokens and "
            f"{count(whole.output_tokens)} output tokens in whole answers",
        ),
    ]
    if run.usd_per_hour is not None:
        about.append(("machine's price", f"{usd(run.usd_per_hour)} per hour"))
    panels = [_panel("The run", terms(about))]
    if run.client is not None:
        panels.append(_panel("The client that measured", terms(_health(run.client))))
    if run.settings:
        panels.append(_panel("Settings", terms(run.settings.items())))
    if run.machine:
        panels.append(_panel("Machine", lines(run.machine)))
    return group(
        "What was run",
        element("h4", "Command that repeats it"),
        element("pre", element("code", run.command), tabindex=0),
        element("div", *panels, class_="panels"),
    )


def _panel(title: str, content: Html) -> Html:
    return element("div", element("h4", title), content, class_="panel")


def _health(client: ClientHealth) -> list[tuple[str, str]]:
    complaints = "; ".join(client.complaints)
    return [
        ("fit to measure", complaints or "yes: it was on time throughout"),
        ("sent late by", f"{_ms(client.late_p99_s)} at p99, {_ms(client.late_max_s)} at most"),
        ("event loop late by", f"{_ms(client.lag_p99_s)} at p99, {_ms(client.lag_max_s)} at most"),
        ("of one core", percent(client.cpu_share)),
        ("open at once", f"{count(client.most_open)} requests at most"),
    ]


def _ms(seconds: float) -> str:
    return duration(seconds * 1e3)
