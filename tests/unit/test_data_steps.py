"""The steps around a pipeline's engines, on single batches: what goes in, and what is read out of it."""

import pickle

import pyarrow as pa
import pytest

from penstock.data.finish import Finish
from penstock.data.outcome import Outcome
from penstock.data.prepare import END, PACKED, SAID, Prepare, packed
from penstock.errors import ConfigError

SEEN = []


def _seen():
    SEEN.append(1)


class Loud:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return _seen, ()


@pytest.fixture
def loud():
    yield Loud
    assert SEEN == []


def request(fields, row):
    return {**fields}


@pytest.mark.parametrize("name", [PACKED, SAID, END, "__penstock_anything"])
def test_a_dataset_with_a_column_of_ours_is_refused_and_never_unpickled(name, loud):
    batch = pa.table({"text": ["a"], name: [pickle.dumps(loud())]})
    with pytest.raises(ConfigError, match=name):
        Prepare(None, request)(batch)


def test_a_postprocess_step_unpickles_no_row_of_the_users(loud):
    batch = pa.table({"text": ["a"], PACKED: [pickle.dumps(loud())]})
    batch = batch.append_column(SAID, packed([{}])).append_column(END, packed([Outcome(state="ok")]))
    step = Finish(None, lambda outcome, fields: {"error": None}, lambda fields: set(), go_on=True)
    assert list(step(batch)["text"]) == ["a"]


def test_rows_of_a_plain_list_travel_packed():
    asked = Prepare(None, request, is_packed=True)(pa.table({PACKED: [pickle.dumps({"text": "a"})]}))
    assert [pickle.loads(row) for row in asked.column(SAID).to_pylist()] == [{"text": "a"}]
