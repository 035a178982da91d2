"""Records as columns and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.columns import Coded, ColumnRecords, Columns
from loadtest.record import Record
from tests.loadtest.some_records import ANY_RECORD, answer


@settings(max_examples=40, deadline=None)
@given(st.lists(ANY_RECORD, max_size=7), st.data())
def test_columns_are_the_same_records(records: list[Record], data: st.DataObject) -> None:
    columns = Columns.of(iter(records))
    rows = data.draw(st.lists(st.sampled_from(range(len(records))))) if records else []

    assert columns.records() == records
    assert columns.take(np.array(rows, np.int64)).records() == [records[row] for row in rows]
    assert columns.ok.tolist() == [record.ok for record in records]
    for name in ("ttft_s", "tpot_s", "e2e_s", "time_to_publish_s"):
        expected = [getattr(record, name) for record in records]
        np.testing.assert_array_equal(getattr(columns, name), np.array(expected, np.float64))


def test_records_of_columns_are_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.columns._ROWS_AT_ONCE", 3)
    records = [answer(each, 5, index=each, gaps_s=(0.1,) * each) for each in range(8)]
    lazy = ColumnRecords(Columns.of(records))

    assert len(lazy) == 8
    assert list(lazy) == records
    assert lazy[2] == records[2]
    assert lazy[-1] == records[-1]
    assert list(lazy[1:7:2]) == records[1:7:2]
    assert list(reversed(lazy)) == records[::-1]
    with pytest.raises(IndexError):
        lazy[8]


def test_columns_are_not_made_twice() -> None:
    columns = Columns.of([answer(1)])

    assert Columns.of(ColumnRecords(columns)) is columns


def test_groups_have_their_rows_in_order_and_leave_out_empty_names() -> None:
    column = Coded(np.array([2, 0, 2, 0, 2]), ("a", "b", "c"))

    assert {name: rows.tolist() for name, rows in column.groups().items()} == {
        "a": [1, 3],
        "c": [0, 2, 4],
    }
    assert column[np.array([4, 3])].tolist() == ["c", "a"]
