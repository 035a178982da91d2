"""Keys have no place in what is kept of a run, wherever they came from: a command line, a server's
answer that repeats what it was sent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from loadtest.columns import ColumnRecords, Columns
from loadtest.record import Run

HIDDEN_KEY = "[key]"


def without_keys(run: Run, keys: Iterable[str]) -> Run:
    """The run, its records as columns, with "[key]" for each of the keys in everything that is text
    for people. The names of tenants, labels and replicas stay as they are."""
    # The longest first: of a key that begins with another one, the rest would be left.
    ordered = sorted(keys, key=len, reverse=True)

    def hide(text: str) -> str:
        for key in ordered:
            text = text.replace(key, HIDDEN_KEY)
        return text

    columns = Columns.of(run.records)
    reason = columns.reason.renamed(lambda text: None if text is None else hide(text))
    client = run.client
    if client is not None:
        client = client._replace(complaints=tuple(map(hide, client.complaints)))
    return replace(
        run,
        name=hide(run.name),
        target=hide(run.target),
        workload=hide(run.workload),
        command=hide(run.command),
        records=ColumnRecords(replace(columns, reason=reason)),
        settings={name: hide(value) for name, value in run.settings.items()},
        machine=tuple(map(hide, run.machine)),
        client=client,
        notes=tuple(map(hide, run.notes)),
    )
