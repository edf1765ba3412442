"""Replicas come with load and go without it; where there is none, a request has one started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from ray import serve

from penstock.serve import LLMConfig, build_openai_app

pytestmark = pytest.mark.parity("S19", "X10")

APP = "elastic"
LIMIT_S = 60
SOON = {"upscale_delay_s": 1.0, "downscale_delay_s": 3.0, "metrics_interval_s": 0.5}


@pytest.fixture
def deploy(serve_url: str) -> Iterator[Callable[..., OpenAI]]:
    def deployed(**autoscaling: Any) -> OpenAI:
        config = LLMConfig(
            model_loading_config={"model_id": "sim"},
            llm_engine="sim",
            engine_kwargs={"step_base_ms": 20.0},
            deployment_config={"autoscaling_config": SOON | autoscaling},
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name=APP)
        return OpenAI(base_url=f"{serve_url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)

    yield deployed
    serve.delete(APP)


def replicas() -> int:
    counts = serve.status().applications[APP].deployments["LLMServer:sim"].replica_states
    return counts.get("RUNNING", 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within the limit: {replicas()} replicas"
        time.sleep(0.1)


def ask(client: OpenAI, tokens: int = 20) -> str:
    made = client.completions.create(
        model="sim", prompt="hello", max_tokens=tokens, extra_body={"ignore_eos": True}
    )
    return made.choices[0].finish_reason


def test_one_becomes_two_becomes_one_and_no_request_is_lost(deploy: Callable[..., OpenAI]):
    client = deploy(min_replicas=1, max_replicas=2, target_ongoing_requests=4)
    assert replicas() == 1
    with ThreadPoolExecutor(8) as many:
        deadline = time.monotonic() + LIMIT_S
        asked = []
        while replicas() < 2:
            assert time.monotonic() < deadline
            asked += [many.submit(ask, client, 25) for _ in range(8)]
            time.sleep(0.5)
        assert {one.result() for one in asked} == {"length"}
    until(lambda: replicas() == 1)
    assert ask(client) == "length"


def test_from_zero_the_request_is_held_and_served(deploy: Callable[..., OpenAI]):
    client = deploy(min_replicas=0, max_replicas=1)
    until(lambda: replicas() == 0)
    assert ask(client) == "length"
    assert replicas() == 1
    until(lambda: replicas() == 0)
    with ThreadPoolExecutor(4) as many:
        assert set(many.map(lambda _: ask(client), range(4))) == {"length"}
