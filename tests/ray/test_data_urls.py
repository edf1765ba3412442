"""Processors that ask somebody else's engines: by a URL, with payloads of their own or with requests."""

import pytest
import ray
from ray import serve

from penstock.data import HttpRequestProcessorConfig, build_processor
from penstock.serve import LLMConfig, build_openai_app

pytestmark = pytest.mark.parity("D3")


@pytest.fixture(scope="module")
def url(serve_url):
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        engine_kwargs={"max_model_len": 512, "kv_tokens": 65536},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="by-url", route_prefix="/by-url")
    yield f"{serve_url}/by-url/v1"
    serve.delete("by-url")


def messages(row):
    return [{"role": "user", "content": row["item"]}]


def test_a_payload_is_posted_as_it_is_and_answered_as_it_came(url):
    processor = build_processor(
        HttpRequestProcessorConfig(url=f"{url}/chat/completions", headers={"x-team": "blue"}),
        preprocess=lambda row: {"payload": {"model": "sim", "messages": messages(row)}},
        postprocess=lambda row: {"said": row["http_response"]["choices"][0]["message"]["content"]},
    )
    assert processor([{"item": "a"}, {"item": "b"}]) == [
        {"said": "a", "error": None},
        {"said": "b", "error": None},
    ]


def test_a_request_gets_the_columns_that_an_own_engine_gives(url):
    processor = build_processor(
        HttpRequestProcessorConfig(url=url),
        preprocess=lambda row: {"messages": messages(row), "sampling_params": {"max_tokens": 20, "n": 2}},
    )
    (row,) = processor([{"item": "hello"}])
    assert (row["generated_text"], row["generated_texts"]) == ("hello", ["hello"] * 2)
    assert (row["item"], row["finish_reason"], row["error"]) == ("hello", "stop", None)
    assert row["num_generated_tokens"] > 0


def test_what_the_service_refuses_is_the_rows_error(url):
    processor = build_processor(
        HttpRequestProcessorConfig(url=f"{url}/chat/completions"),
        preprocess=lambda row: {"payload": {"model": row["item"], "messages": messages(row)}},
    )
    rows = processor([{"item": "sim"}, {"item": "no-such-model"}])
    assert [row["error"] and row["error"]["status"] for row in rows] == [None, 404]
    assert "no-such-model" in rows[1]["error"]["message"]
