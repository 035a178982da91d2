"""Rows as CSV and as JSON lines."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

import pytest

from gateway.ledger.export import NAMES, csv_head, csv_rows, json_rows
from gateway.ledger.pages import COLUMNS
from tests.gateway.ledger.rows import row


def values(**fields: Any) -> tuple[Any, ...]:
    """A row as the database gives it."""
    found = asdict(row(**fields))
    return tuple(found[name] for name in COLUMNS)


def read_csv(text: bytes) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text.decode(), newline="")))


def test_csv_says_everything_plainly() -> None:
    text = csv_head() + csv_rows(
        [
            values(
                id="a",
                finished_s=1_800_000_000.123456,
                cost_nusd=1_234_567_890,
                met_slo=True,
                streamed=False,
                status=None,
                tpot_s=1e-7,
            )
        ]
    )
    assert text.endswith(b"\r\n")
    [found] = read_csv(text)
    assert tuple(found) == NAMES
    assert found["finished_s"] == "1800000000.123456"
    assert found["cost_nusd"] == "1234567890"
    assert found["cost_usd"] == "1.234567890"
    assert (found["met_slo"], found["streamed"], found["status"]) == ("true", "false", "")
    assert float(found["tpot_s"]) == 1e-7
    assert found["publish_s"] == ""


@pytest.mark.parametrize("beginning", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_is_a_formula(beginning: str) -> None:
    evil = beginning + 'HYPERLINK("http://evil","x"),"y"\n'
    [found] = read_csv(csv_head() + csv_rows([values(request_id=evil, replica=evil)]))
    assert found["request_id"] == "'" + evil
    assert found["replica"] == "'" + evil


def test_json_lines_have_their_types() -> None:
    text = json_rows([values(id="a", request_id="=1"), values(id="b", met_slo=None)])
    first, second = (json.loads(line) for line in text.splitlines())
    assert tuple(first) == NAMES
    assert (first["id"], first["request_id"], first["met_slo"]) == ("a", "=1", True)
    assert (second["cost_nusd"], second["cost_usd"], second["met_slo"]) == (
        1000,
        "0.000001000",
        None,
    )


def test_a_row_is_one_line_whoever_cuts_them() -> None:
    written = json_rows([values(request_id="a\u2028b\u0085c"), values(request_id="d")]).decode()
    found = [json.loads(line) for line in written.splitlines()]
    assert [each["request_id"] for each in found] == ["a\u2028b\u0085c", "d"]
