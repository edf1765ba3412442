"""Rows that a pipeline keeps in an actor: enough for its engine, though a call ends with its slowest row."""

import random
from statistics import fmean

import pytest

from penstock.data.pipeline.processor import call_shape


def lengths(count: int, draw: random.Random) -> list[float]:
    """Tokens of answers as they are often found: 57 on average, 400 at most."""
    return [min(400.0, max(4.0, draw.lognormvariate(3.69, 0.9))) for _ in range(count)]


@pytest.mark.parametrize("concurrent", [8, 64, 256, 512, 1024])
def test_rows_of_uneven_length_fill_the_batch_and_a_quarter_more(concurrent: int):
    rows, calls = call_shape(concurrent, 64)
    draw = random.Random(1)
    drawn = [lengths(rows, draw) for _ in range(500)]
    active = rows * fmean(map(fmean, drawn)) / fmean(map(max, drawn))
    assert calls * active > 1.25 * concurrent


@pytest.mark.parametrize("most_rows", [1, 5, 64, 1000])
@pytest.mark.parametrize("concurrent", [1, 8, 256, 1024])
def test_a_call_has_no_more_rows_than_a_batch_and_some_calls_run_beside_it(concurrent: int, most_rows: int):
    rows, calls = call_shape(concurrent, most_rows)
    assert 1 <= rows <= most_rows
    assert 4 <= calls <= 128
