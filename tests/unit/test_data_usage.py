"""Tokens of an answer: a job's report and a pipeline's columns read them alike, whoever answered."""

import msgspec
import pytest

from penstock.data.job.worker import row_completed
from penstock.data.results.columns import result_columns
from penstock.data.results.outcome import Outcome
from penstock.data.rows.request import Task

USAGES = [
    {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 4},
    {"input_tokens": 5, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
    {"input_tokens": 1, "output_tokens": 3, "cache_read_input_tokens": 4},
    {
        "input_tokens": 0,
        "output_tokens": 3,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 1,
    },
]


@pytest.mark.parametrize("usage", USAGES)
def test_jobs_and_pipelines_count_the_same_tokens(usage):
    body = {"choices": [{"message": {"content": "x"}}], "usage": usage}
    end = Outcome(state="ok", body=msgspec.Raw(msgspec.json.encode(body)))
    done, found = row_completed(0, end), result_columns(Task(), end)
    in_columns = (found["num_input_tokens"], found["num_cached_tokens"], found["num_generated_tokens"])
    assert (done.prompt_tokens, done.cached_tokens, done.output_tokens) == in_columns == (5, 4, 3)
