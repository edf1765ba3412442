"""Models that take turns on the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from ray import serve
from tests.ray.zoo import KEY, LIMIT_S
from tests.waiting import wait_until

from penstock.serve import LLMConfig, build_openai_app

pytestmark = pytest.mark.parity("X7")

APP = "turns"


def model(model_id: str, group: str, awake: int) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        on_demand={"group": group, "awake": awake, "min_awake_s": 0.5},
    )


class Service:
    """Three models of which two may be awake, and two that take turns by one."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=LIMIT_S)
        self.client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
        configs = [model(name, "three", 2) for name in "abc"] + [model(name, "two", 1) for name in "de"]
        app = build_openai_app({"llm_configs": configs, "gateway": {"admin_key": KEY}})
        serve.run(app, name=APP, route_prefix=f"/{APP}")

    def ask(self, model_id: str) -> str:
        return self.client.completions.create(model=model_id, prompt=f"for {model_id}").choices[0].text

    def states(self, models: str) -> dict[str, list[str]]:
        found: dict[str, Any] = self.http.get("/admin/status").json()
        return {name: [one["actual"] for one in found[name]["replicas"].values()] for name in models}

    def awake(self, models: str) -> set[str]:
        return {name for name, states in self.states(models).items() if states == ["ready"]}


@pytest.fixture(scope="module")
def service(serve_url: str) -> Iterator[Service]:
    """An application of its own: which of its models are awake is what is shown."""
    yield Service(f"{serve_url}/{APP}")
    serve.delete(APP)


def test_a_request_wakes_its_model_and_the_one_unused_for_longest_sleeps(service: Service):
    assert sorted(service.states("abc").values()) == [["asleep"], ["ready"], ["ready"]]
    assert service.ask("a") == "for a"
    for asked, awake in (("b", {"a", "b"}), ("c", {"b", "c"}), ("a", {"a", "c"})):
        assert service.ask(asked) == f"for {asked}"
        wait_until(lambda awake=awake: service.awake("abc") == awake)


def test_requests_for_both_at_once_are_all_answered(service: Service):
    with ThreadPoolExecutor(8) as many:
        asked = ["d", "e"] * 20
        assert list(many.map(service.ask, asked)) == [f"for {one}" for one in asked]
    wait_until(lambda: len(service.awake("de")) == 1)
    assert service.http.get("/health").status_code == 200
