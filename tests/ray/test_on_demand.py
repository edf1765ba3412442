"""Models that take turns on the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from ray import serve

from penstock.serve import LLMConfig, build_openai_app

pytestmark = pytest.mark.parity("X7")

APP, KEY, LIMIT_S = "turns", "k", 60


def model(model_id: str, awake: int) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        on_demand={"awake": awake, "min_awake_s": 0.5},
    )


class Service:
    def __init__(self, url: str, models: str, awake: int) -> None:
        self.models = list(models)
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=LIMIT_S)
        self.client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
        configs = [model(model_id, awake) for model_id in models]
        serve.run(build_openai_app({"llm_configs": configs, "gateway": {"admin_key": KEY}}), name=APP)

    def ask(self, model_id: str) -> str:
        return self.client.completions.create(model=model_id, prompt=f"for {model_id}").choices[0].text

    def states(self) -> dict[str, list[str]]:
        found: dict[str, Any] = self.http.get("/admin/status").json()
        return {name: [one["actual"] for one in state["replicas"].values()] for name, state in found.items()}

    def awake(self) -> set[str]:
        return {name for name, states in self.states().items() if states == ["ready"]}


@pytest.fixture
def service(serve_url: str) -> Iterator[Callable[..., Service]]:
    yield lambda models, awake: Service(serve_url, models, awake)
    serve.delete(APP)


def test_a_request_wakes_its_model_and_the_one_unused_for_longest_sleeps(service: Callable[..., Service]):
    fleet = service("abc", 2)
    assert len(fleet.awake()) == 2
    assert sorted(fleet.states().values()) == [["asleep"], ["ready"], ["ready"]]
    for asked, awake in (("a", None), ("b", {"a", "b"}), ("c", {"b", "c"}), ("a", {"a", "c"})):
        assert fleet.ask(asked) == f"for {asked}"
        time.sleep(0.3)
        assert awake is None or fleet.awake() == awake


def test_requests_for_both_at_once_are_all_answered(service: Callable[..., Service]):
    fleet = service("ab", 1)
    with ThreadPoolExecutor(8) as many:
        asked = ["a", "b"] * 20
        assert list(many.map(fleet.ask, asked)) == [f"for {one}" for one in asked]
    assert len(fleet.awake()) == 1
    assert fleet.http.get("/health").status_code == 200
