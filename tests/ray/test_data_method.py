"""Methods of any deployment as rows call them, and an engine that stages share for a while."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from backend_contract import config
from ray import serve
from tests.ray.toy import Question
from tests.waiting import until

from penstock.data.backends.serve_deployment import ServeDeployment
from penstock.data.backends.serve_handle import method_call
from penstock.data.execution.window import Window
from penstock.data.pipeline.shared_engine import SharedEngine
from penstock.errors import BadRequest, ConfigError, EngineDead, EngineStartFailed, OwnCodeFailed, Unavailable
from penstock.serve import build_llm_deployment
from penstock.serve.openai_api_models import CompletionRequest

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.parity("D4")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def methods(toy: str) -> ServeDeployment:
    methods = ServeDeployment(toy, dtypes={"Question": Question})
    await methods.start()
    return methods


async def test_a_class_named_by_the_row_goes_in_and_its_fields_come_out(methods: ServeDeployment):
    assert await methods.call("ask", {"text": "ab", "times": 2}, "Question") == {"text": "abab", "times": 1}


async def test_without_a_class_a_dict_goes_in(methods: ServeDeployment):
    assert await methods.call("add", {"a": 1, "b": 2}) == {"result": 3}


async def test_a_dataclass_comes_out_as_its_fields(methods: ServeDeployment):
    assert await methods.call("point", {"x": 3}) == {"x": 3}


async def test_arrays_and_bytes_pass_as_they_are(methods: ServeDeployment):
    found = await methods.call("double", {"array": np.arange(3), "raw": b"\x00\xff"})
    assert found["array"].tolist() == [0, 2, 4]
    assert found["raw"] == b"\x00\xff"


@pytest.mark.parametrize(
    ("to", "found"), [(0, {"results": []}), (1, {"result": 0}), (3, {"results": [0, 1, 2]})]
)
async def test_a_stream_is_its_only_item_or_all_of_them(
    methods: ServeDeployment, to: int, found: dict[str, Any]
):
    assert await methods.call("count", {"to": to}) == found


async def test_an_error_as_a_result_is_no_success(methods: ServeDeployment):
    answer = await methods.send(method_call("refuse", {}))
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["code"] == "context_length_exceeded"


async def test_what_a_method_raises_is_told(methods: ServeDeployment):
    with pytest.raises(BadRequest, match=r"fail of Deployment 'Toy' of application 'toy' failed .* this row"):
        await methods.call("fail", {"bad": True})
    with pytest.raises(OwnCodeFailed, match="KeyError"):
        await methods.call("fail", {"bad": False})


@pytest.mark.parametrize(
    ("method", "kwargs", "dtype", "said"),
    [
        ("nothing", {}, None, "nothing"),
        ("ask", {}, "Answer", "dtype_mapping has no 'Answer'; it has 'Question'"),
        ("ask", {"words": 1}, "Question", "Question cannot be made of request_kwargs: ValidationError"),
    ],
)
async def test_a_wrong_row_is_told_what_is_wrong(
    methods: ServeDeployment, method: str, kwargs: Any, dtype: str | None, said: str
):
    answer = await methods.send(method_call(method, kwargs, dtype))
    assert answer.status == 400
    assert said in json.loads(answer.body)["error"]["message"]


async def test_arrays_are_lists_in_an_answer_for_columns(methods: ServeDeployment):
    answer = await methods.send(method_call("double", {"array": np.arange(3), "raw": 1}))
    assert json.loads(answer.body) == {"array": [0, 2, 4], "raw": 1}


async def test_a_window_runs_methods_through_the_death_of_the_replica(methods: ServeDeployment):
    pid = (await methods.call("wait", {"s": 0}))["result"]
    window = Window(methods, exclusive=False)
    rows = [asyncio.create_task(window.run(method_call("wait", {"s": 3}))) for _ in range(20)]
    await until(lambda: window.in_flight == 20)
    os.kill(pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*rows)
    assert {outcome.state for outcome in outcomes} == {"ok"}
    assert pid not in {json.loads(bytes(outcome.body))["result"] for outcome in outcomes}


async def test_the_death_of_a_replica_ends_its_calls(methods: ServeDeployment):
    pid = (await methods.call("wait", {"s": 0}))["result"]
    calling = asyncio.create_task(methods.call("wait", {"s": 60}))
    await asyncio.sleep(0)  # it is sent
    await methods.call("wait", {"s": 0})  # came after it: that one is in the replica
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(calling, 20)
    await methods.start()
    assert (await methods.call("wait", {"s": 0}))["result"] != pid


async def test_an_application_that_has_gone_is_unavailable(methods: ServeDeployment):
    with pytest.raises(ConfigError, match="No application 'gone'"):
        await ServeDeployment("gone").start()
    with pytest.raises(Unavailable, match="Call `start` before"):
        await ServeDeployment("toy").call("add", {})


def application(**options: Any) -> Any:
    once = {"max_constructor_retry_count": 1}
    return build_llm_deployment(config(**options).model_copy(update={"deployment_config": once}))


async def test_a_shared_engine_is_there_for_as_long_as_it_is_needed(methods: ServeDeployment):
    shared = SharedEngine(application(), "shared")
    names = shared.start()  # on a running loop, as in a notebook
    assert names.arguments == {"app_name": "shared", "deployment_name": "LLMServer:m"}
    completions = ServeDeployment(**names.arguments, dtypes={"CompletionRequest": CompletionRequest})
    await completions.start()
    found = await completions.call("completions", {"model": "m", "prompt": "hello"}, "CompletionRequest")
    assert found["choices"][0]["text"] == "hello"
    refused = await completions.send(method_call("completions", {"prompt": "x " * 600}))
    assert refused.status == 400
    await completions.stop()
    await asyncio.to_thread(shared.stop)
    assert set(serve.status().applications) >= {"toy"}
    assert "shared" not in serve.status().applications


async def test_an_application_of_somebody_else_is_left_alone(methods: ServeDeployment):
    with pytest.raises(ConfigError, match="An application 'toy' runs already"):
        await asyncio.to_thread(SharedEngine(application(), "toy").start)
    assert "toy" in serve.status().applications


async def test_a_shared_engine_that_cannot_start_says_why_and_leaves_nothing(methods: ServeDeployment):
    broken = SharedEngine(application(start_error="no such weights"), "broken")
    with pytest.raises(EngineStartFailed, match="no such weights"):
        await asyncio.to_thread(broken.start)
    assert "broken" not in serve.status().applications
