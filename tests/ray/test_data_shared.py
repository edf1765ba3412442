"""Stages that share one deployment: a model's, by requests and by methods, and anybody's."""

import pytest
import ray
from ray import serve

from penstock.data import ServeDeploymentProcessorConfig, build_processor
from penstock.serve import LLMConfig, build_llm_deployment
from penstock.serve.openai_api_models import ChatCompletionRequest

pytestmark = pytest.mark.parity("D4")

DTYPES = {"ChatCompletionRequest": ChatCompletionRequest}


@pytest.fixture(scope="module")
def model(serve_url):
    """A simulated model of two replicas."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        engine_kwargs={"max_model_len": 512, "kv_tokens": 65536},
        deployment_config={"num_replicas": 2},
    )
    serve.run(build_llm_deployment(config), name="shared", route_prefix=None)
    yield ServeDeploymentProcessorConfig(app_name="shared", dtype_mapping=DTYPES, batch_size=16)
    serve.delete("shared")


def messages(text):
    return [{"role": "user", "content": text}]


def test_a_request_gets_the_columns_that_an_own_engine_gives(model):
    rows = build_processor(model, preprocess=lambda row: {"messages": messages(row["item"]), "n": 2})(
        [{"item": f"row {n}"} for n in range(40)]
    )
    assert [row["generated_text"] for row in rows] == [f"row {n}" for n in range(40)]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert all(row["error"] is None and row["num_generated_tokens"] > 0 for row in rows)


def test_two_turns_on_one_deployment(model):
    """The program of the pull request that brought shared engines: method, dtype, request_kwargs."""

    def turn(text):
        kwargs = {"model": "sim", "messages": messages(text), "stream": False}
        return {"method": "chat", "dtype": "ChatCompletionRequest", "request_kwargs": kwargs}

    first = build_processor(
        model,
        preprocess=lambda row: turn(row["item"]),
        postprocess=lambda row: {"said": row["choices"][0]["message"]["content"]},
    )
    second = build_processor(
        model,
        preprocess=lambda row: turn(row["said"] + " again"),
        postprocess=lambda row: {"end": row["generated_text"], "tokens": row["usage"]["completion_tokens"]},
    )
    rows = second(first(ray.data.from_items([{"item": "a"}, {"item": "b"}]))).take_all()
    assert sorted(row["end"] for row in rows) == ["a again", "b again"]
    assert all(row["tokens"] > 0 for row in rows)


@pytest.mark.parity("D4", "D11")
def test_what_a_model_refuses_is_an_error_not_an_answer(model):
    def ask(row):
        kwargs = {"model": "sim", "messages": messages("x" * row["chars"])}
        return {"method": row["method"], "request_kwargs": kwargs}

    rows = build_processor(model, preprocess=ask)(
        [
            {"method": "chat", "chars": 3},
            {"method": "chat", "chars": 9_000},
            {"method": "no_such", "chars": 3},
        ]
    )
    assert rows[0]["error"] is None
    assert rows[1]["error"]["code"] == "context_length_exceeded"
    assert "no_such" in rows[2]["error"]["message"]


def test_any_deployment_and_any_method_of_it(serve_url):
    @serve.deployment
    class Adder:
        def plus(self, request: dict) -> int:
            return request["a"] + request["b"]

        def both(self, request: dict) -> dict:
            return {"sum": request["a"] + request["b"], "product": request["a"] * request["b"]}

    serve.run(Adder.bind(), name="adder", route_prefix=None)
    config = ServeDeploymentProcessorConfig(app_name="adder", deployment_name="Adder")
    rows = build_processor(
        config, preprocess=lambda row: {"method": row["how"], "request_kwargs": {"a": row["a"], "b": 3}}
    )([{"how": "plus", "a": 1}, {"how": "both", "a": 2}, {"how": "plus", "a": None}])
    serve.delete("adder")
    assert rows[0]["result"] == 4
    assert (rows[1]["sum"], rows[1]["product"]) == (5, 6)
    assert "TypeError" in rows[2]["error"]["message"]


def test_a_program_runs_on_a_shared_model(model):
    async def twice(row, llm):
        first = await llm.chat(row["item"], max_tokens=20)
        return {"end": (await llm.chat(first.text + "!", max_tokens=20)).text}

    rows = build_processor(model, program=twice)([{"item": "a"}, {"item": "b"}])
    assert [(row["end"], row["calls"]) for row in rows] == [("a!", 2), ("b!", 2)]


def test_a_wrong_application_says_which_there_are(model):
    processor = build_processor(ServeDeploymentProcessorConfig(app_name="no-such"))
    with pytest.raises(Exception, match=r"No application 'no-such'.*'shared'"):
        processor([{"prompt": "x"}])
