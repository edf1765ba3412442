"""Stages that share one deployment: a model's, by requests and by methods, and anybody's."""

import os

import pytest
import ray
from tests.ray.zoo import APP, FAST

from penstock.config import LLMConfig
from penstock.data import ServeDeploymentProcessorConfig, build_processor
from penstock.data.backends.in_process import StartedEngine
from penstock.serve.openai_api_models import ChatCompletionRequest

pytestmark = pytest.mark.parity("D4")

DTYPES = {"ChatCompletionRequest": ChatCompletionRequest}


@pytest.fixture(scope="module")
def model(zoo):
    """A simulated model of two replicas."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ServeDeploymentProcessorConfig(
        app_name=APP, deployment_name=f"LLMServer:{FAST}", dtype_mapping=DTYPES, batch_size=16
    )


def messages(text):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def answered(model):
    """Forty requests, and calls of methods of which the second is too long and the third has no method."""

    def ask(row):
        if "n" in row:
            return {"messages": messages(f"row {row['n']}"), "n": 2}
        kwargs = {"model": FAST, "messages": messages("x" * row["chars"])}
        return {"method": row["method"], "request_kwargs": kwargs}

    requests = [{"n": n} for n in range(40)]
    calls = [("chat", 3), ("chat", 9_000), ("no_such", 3)]
    rows = build_processor(model, preprocess=ask)(
        [*requests, *({"method": method, "chars": chars} for method, chars in calls)]
    )
    return rows[:40], rows[40:]


def test_a_request_gets_the_columns_that_an_own_engine_gives(answered):
    rows, _ = answered
    assert [row["generated_text"] for row in rows] == [f"row {n}" for n in range(40)]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    assert all(row["error"] is None and row["num_generated_tokens"] > 0 for row in rows)


@pytest.mark.parity("D4", "D11")
def test_what_a_model_refuses_is_an_error_not_an_answer(answered):
    _, (good, long, strange) = answered
    assert good["error"] is None
    assert long["error"]["code"] == "context_length_exceeded"
    assert "no_such" in strange["error"]["message"]


@pytest.fixture(scope="module")
def chained(model):
    """Two turns and a program: three stages on one deployment.

    The turns are the program of the pull request that brought shared engines: method, dtype, request_kwargs.
    """

    def turn(text):
        kwargs = {"model": FAST, "messages": messages(text), "stream": False}
        return {"method": "chat", "dtype": "ChatCompletionRequest", "request_kwargs": kwargs}

    async def twice(row, llm):
        first = await llm.chat(row["end"], max_tokens=20)
        return {**row, "said": (await llm.chat(first.text + "!", max_tokens=20)).text}

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
    third = build_processor(model, program=twice)
    rows = third(second(first(ray.data.from_items([{"item": "a"}, {"item": "b"}])))).take_all()
    return sorted(rows, key=lambda row: row["end"])


def test_two_turns_on_one_deployment(chained):
    assert [row["end"] for row in chained] == ["a again", "b again"]
    assert all(row["tokens"] > 0 for row in chained)


def test_a_program_runs_on_a_shared_model(chained):
    assert [(row["said"], row["calls"]) for row in chained] == [("a again!", 2), ("b again!", 2)]


def test_any_deployment_and_any_method_of_it(toy):
    config = ServeDeploymentProcessorConfig(app_name=toy, deployment_name="Toy")
    rows = build_processor(
        config, preprocess=lambda row: {"method": row["how"], "request_kwargs": {"a": row["a"], "b": 3}}
    )([{"how": "add", "a": 1}, {"how": "both", "a": 2}, {"how": "add", "a": None}])
    assert rows[0]["result"] == 4
    assert (rows[1]["sum"], rows[1]["product"]) == (5, 6)
    assert "TypeError" in rows[2]["error"]["message"]


async def test_an_engine_in_a_program_names_the_cluster_to_its_own_processes_alone(
    serve_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    named: list[str | None] = []
    model = LLMConfig(model_loading_config={"model_id": "sim"}, llm_engine="sim")
    engine = await StartedEngine.start(model, lambda _phase: named.append(os.environ.get("RAY_ADDRESS")))
    await engine.stop()
    assert set(named) == {ray.get_runtime_context().gcs_address}
    assert "RAY_ADDRESS" not in os.environ
