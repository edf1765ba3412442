"""What postprocessing gets: columns, results, and the request in reach."""

from __future__ import annotations

import copy
import pickle

import pytest

from penstock.data.results.merge import RowView, row_view

REQUEST = {"messages": [{"role": "user", "content": "Hi"}], "sampling_params": {"temperature": 0}}
RESULTS = {"generated_text": "Hello.", "error": None}


def made(**row: object) -> RowView:
    return row_view(row, {"note": 1}, REQUEST, RESULTS)


@pytest.mark.parity("D1")
def test_the_announcements_postprocess_gives_answer_and_all_columns():
    row = made(item="a")
    out = dict(answer=row["generated_text"], **row)
    assert out == {"answer": "Hello.", "item": "a", "note": 1, "generated_text": "Hello.", "error": None}


def test_request_fields_can_be_read_but_are_no_columns():
    row = made(item="a")
    assert row["messages"] == REQUEST["messages"]
    assert row.get("sampling_params") == {"temperature": 0}
    assert row.get("nothing", 3) == 3
    assert "messages" not in row
    assert "messages" not in {**row}


@pytest.mark.parity("D15")
def test_a_column_with_a_results_name_is_kept_beside_it():
    row = made(error="mine", item="a")
    assert (row["error"], row["original_error"]) == (None, "mine")


@pytest.mark.parity("D15")
def test_a_third_stage_overwrites_neither_of_the_others():
    first = row_view({"item": 1}, {}, {}, {"generated_text": "one"})
    second = row_view(first, {}, {}, {"generated_text": "two"})
    third = row_view(second, {}, {}, {"generated_text": "three"})
    texts = [third[f"{kept}generated_text"] for kept in ("", "original_", "original_original_")]
    assert texts == ["three", "two", "one"]


def test_a_column_named_as_a_request_field_hides_it():
    row = row_view({"messages": "mine"}, {}, REQUEST, RESULTS)
    assert row["messages"] == "mine"
    assert row.request["messages"] == REQUEST["messages"]


def test_an_unknown_name_tells_the_columns():
    with pytest.raises(
        KeyError, match="'answer'; there are item, note, generated_text, error; the request has"
    ):
        made(item="a")["answer"]


def test_a_view_survives_pickling_and_copying():
    row = made(item="a")
    for other in (pickle.loads(pickle.dumps(row)), copy.copy(row)):
        assert other == row
        assert other["messages"] == REQUEST["messages"]


def test_the_users_row_is_not_changed():
    row = {"error": "mine"}
    row_view(row, {}, REQUEST, RESULTS)
    assert row == {"error": "mine"}
