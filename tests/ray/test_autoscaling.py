"""Replicas come with load and go without it; where there is none, a request has one started."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI
from ray import serve
from tests.ray.zoo import LIMIT_S
from tests.waiting import wait_until

from penstock.serve import LLMConfig, build_openai_app

pytestmark = pytest.mark.parity("S19", "X10")

APP = "elastic"
SOON = {"upscale_delay_s": 0.5, "downscale_delay_s": 1.0, "metrics_interval_s": 0.5}
ONE_OR_TWO = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 4}
NONE_OR_ONE = {"min_replicas": 0, "max_replicas": 1}


@pytest.fixture(scope="module")
def client(serve_url: str) -> Iterator[OpenAI]:
    """An application of its own: how many replicas it has is what is shown."""
    configs = [config("busy", ONE_OR_TWO), config("rare", NONE_OR_ONE)]
    serve.run(build_openai_app({"llm_configs": configs}), name=APP, route_prefix=f"/{APP}")
    yield OpenAI(base_url=f"{serve_url}/{APP}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
    serve.delete(APP)


def config(model_id: str, autoscaling: dict[str, Any]) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        engine_kwargs={"step_base_ms": 20.0},
        deployment_config={"autoscaling_config": SOON | autoscaling},
    )


def replicas(model: str) -> int:
    counts = serve.status().applications[APP].deployments[f"LLMServer:{model}"].replica_states
    return counts.get("RUNNING", 0)


def ask(client: OpenAI, model: str) -> str:
    made = client.completions.create(
        model=model, prompt="hello", max_tokens=25, extra_body={"ignore_eos": True}
    )
    return made.choices[0].finish_reason


def test_one_becomes_two_becomes_one_and_no_request_is_lost(client: OpenAI):
    assert replicas("busy") == 1
    over = threading.Event()

    def again_and_again() -> set[str]:
        ends = {ask(client, "busy")}
        while not over.is_set():
            ends.add(ask(client, "busy"))
        return ends

    with ThreadPoolExecutor(10) as many:
        asked = [many.submit(again_and_again) for _ in range(10)]
        try:
            wait_until(lambda: replicas("busy") == 2)
        finally:
            over.set()
    assert [one.result() for one in asked] == [{"length"}] * 10
    wait_until(lambda: replicas("busy") == 1)
    assert ask(client, "busy") == "length"


def test_from_zero_the_request_is_held_and_served(client: OpenAI):
    wait_until(lambda: replicas("rare") == 0)
    assert ask(client, "rare") == "length"
    assert replicas("rare") == 1
    wait_until(lambda: replicas("rare") == 0)
    with ThreadPoolExecutor(4) as many:
        assert set(many.map(lambda _: ask(client, "rare"), range(4))) == {"length"}
