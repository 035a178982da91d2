"""`loadtest report`: one page of runs that were kept."""

from __future__ import annotations

from pathlib import Path

from loadtest.run_file import write_run
from tests.loadtest.cli.serving import command
from tests.loadtest.report.made_runs import queue


def test_runs_become_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    kept = [tmp_path / "a.json", tmp_path / "b.json.gz"]
    for path, name in zip(kept, ("one", "other"), strict=True):
        write_run(path, queue(2.0, 5, name=name))
    code, output = command(
        "report", *map(str, kept), "--html", str(page), "--title", "Both <of> us"
    )

    assert (code, output) == (0, f"wrote {page}\n")
    assert "<title>Both &lt;of&gt; us</title>" in page.read_text()


def test_what_is_no_run_ends_with_2_and_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    page = ("--html", str(tmp_path / "page.html"))

    assert command("report", str(other), *page) == (
        2,
        f"loadtest: {other}: this is no run of a load test, or only a part of one\n",
    )
    assert command("report", str(tmp_path), *page)[0] == 2
    assert command("report", str(other), "--html", "/no/such/page.html") == (
        2,
        "loadtest: /no/such/page.html: cannot be written (there is no directory /no/such)\n",
    )
    assert not (tmp_path / "page.html").exists()
