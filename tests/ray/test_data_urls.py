"""Processors that ask somebody else's engines: by a URL, with payloads of their own or with requests."""

import pytest
import ray
from tests.ray.zoo import FAST

from penstock.data import HttpRequestProcessorConfig, build_processor

pytestmark = pytest.mark.parity("D3")


@pytest.fixture(scope="module")
def url(zoo):
    ray.data.DataContext.get_current().enable_progress_bars = False
    return f"{zoo.proxied}/v1"


def messages(row):
    return [{"role": "user", "content": row["item"]}]


@pytest.fixture(scope="module")
def posted(url):
    """Payloads as a user writes them, of which the last names a model that is not there."""
    processor = build_processor(
        HttpRequestProcessorConfig(url=f"{url}/chat/completions", headers={"x-team": "blue"}),
        preprocess=lambda row: {"payload": {"model": row["model"], "messages": messages(row)}},
        postprocess=lambda row: {"said": row["http_response"]["choices"][0]["message"]["content"]},
    )
    return processor([{"item": item, "model": FAST} for item in "ab"] + [{"item": "c", "model": "no-such"}])


def test_a_payload_is_posted_as_it_is_and_answered_as_it_came(posted):
    assert posted[:2] == [{"said": "a", "error": None}, {"said": "b", "error": None}]


def test_what_the_service_refuses_is_the_rows_error(posted):
    error = posted[2]["error"]
    assert error["status"] == 404
    assert "no-such" in error["message"]


def test_a_request_gets_the_columns_that_an_own_engine_gives(url):
    processor = build_processor(
        HttpRequestProcessorConfig(url=url, model=FAST),
        preprocess=lambda row: {"messages": messages(row), "sampling_params": {"max_tokens": 20, "n": 2}},
    )
    (row,) = processor([{"item": "hello"}])
    assert (row["generated_text"], row["generated_texts"]) == ("hello", ["hello"] * 2)
    assert (row["item"], row["finish_reason"], row["error"]) == ("hello", "stop", None)
    assert row["num_generated_tokens"] > 0
