"""What programs of Ray's documentation say to a processor, and what then happens on a real Ray Data."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest
import ray
from aiohttp.abc import AbstractResolver
from tests.ray.test_data_processor import ask, sim
from tests.ray.zoo import FAST

from penstock.data import (
    EngineProcessorConfig,
    HttpRequestProcessorConfig,
    HttpRequestStageConfig,
    ServeDeploymentProcessorConfig,
    build_processor,
)
from penstock.errors import ConfigError

pytestmark = [
    pytest.mark.usefixtures("serve_url"),
    pytest.mark.parity("D1", "D3", "D15"),
    pytest.mark.full,
]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    ray.data.DataContext.get_current().enable_progress_bars = False


def team_of_the_actor(request):
    """A preprocessor of the model, which runs in the engine's actor."""
    if request["messages"][0]["content"] == "break":
        return request["no such field"]
    return {"prompt": os.environ.get("TEAM", "none")}


@pytest.fixture(scope="module")
def rows():
    """Rows of one engine whose stage got an environment after the processor was built."""
    model = sim().model_copy(update={"preprocessor": team_of_the_actor})
    processor = build_processor(
        EngineProcessorConfig(llm_config=model, should_continue_on_error=True), preprocess=ask
    )
    (name,) = processor.list_stage_names()
    processor.get_stage_by_name(name).map_batches_kwargs["runtime_env"] = {"env_vars": {"TEAM": "blue"}}
    return processor([{"item": "hello"}, {"item": "break"}])


def test_options_of_a_stage_reach_its_actors(rows):
    assert rows[0]["generated_text"] == "blue"


@pytest.mark.parity("D11")
def test_what_the_models_preprocessor_raises_is_the_rows_error_and_is_not_retried(rows):
    error = rows[1]["error"]
    assert (error["code"], error["attempts"]) == ("own_code_failed", 1)
    assert "KeyError: 'no such field'" in error["message"]


@pytest.mark.parity("D11")
def test_each_row_names_its_failure_as_rays_do_where_the_program_says_to_go_on(rows):
    assert [bool(row["__inference_error__"]) for row in rows] == [False, True]
    assert rows[1]["__inference_error__"] == rows[1]["error"]["message"]


def test_a_stage_that_is_not_there_is_a_value_error_with_those_that_are():
    processor = build_processor(EngineProcessorConfig(llm_config=sim()))
    with pytest.raises(ValueError, match="no stage 'ChatTemplateStage'; this processor has EngineStage"):
        processor.get_stage_by_name("ChatTemplateStage")


def test_options_that_the_stage_sets_are_refused():
    processor = build_processor(EngineProcessorConfig(llm_config=sim()))
    processor.get_stage_by_name("EngineStage").map_batches_kwargs["compute"] = None
    with pytest.raises(ConfigError, match="map_batches_kwargs of EngineStage: compute cannot be set"):
        processor([{"item": "a"}])


def payload(row):
    return {"payload": {"model": FAST, "messages": [{"role": "user", "content": row["item"]}]}}


class EveryHostIsHere(AbstractResolver):
    async def resolve(self, host, port=0, family=socket.AF_INET):
        found = {"hostname": host, "host": "127.0.0.1", "port": port}
        return [found | {"family": socket.AF_INET, "proto": 0, "flags": 0}]

    async def close(self):
        pass


def session():
    """A service on this machine without a key refuses foreign host names."""
    connector = aiohttp.TCPConnector(resolver=EveryHostIsHere())
    return aiohttp.ClientSession(connector=connector, headers={"host": "localhost"})


def test_a_session_of_ones_own_sends_the_requests(zoo):
    """Only it finds the host of this URL."""
    url = f"http://models.invalid:{urlsplit(zoo.proxied).port}{urlsplit(zoo.proxied).path}"
    processor = build_processor(
        HttpRequestProcessorConfig(
            url=f"{url}/v1/chat/completions",
            session_factory=session,
            http_request_stage=HttpRequestStageConfig(concurrency=2, batch_size=1, num_cpus=0),
        ),
        payload,
        lambda row: {"said": row["http_response"]["choices"][0]["message"]["content"]},
    )
    assert [row["said"] for row in processor([{"item": "a"}, {"item": "b"}])] == ["a", "b"]


def test_a_call_that_takes_too_long_is_the_rows_error(toy):
    config = ServeDeploymentProcessorConfig(
        app_name=toy, deployment_name="Toy", request_timeout_s=0.5, max_attempts=1
    )
    (row,) = build_processor(config, preprocess=lambda row: {"method": "wait", "request_kwargs": {"s": 20}})(
        [{"item": "a"}]
    )
    assert row["error"]["status"] == 504
    assert "request_timeout_s, 0.5 s" in row["error"]["message"]
