"""What tests of clients share: an application that is asked both ways, and how to read answers."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from ray import serve
from ray.serve.handle import DeploymentHandle
from tests.models import model
from tests.ports import unused

from penstock.serve import build_openai_app

WAYS = ["Serve's HTTP", "own port"]
"""Both are asked the same: the gateway's own port, which is what `penstock serve` has, and Serve's HTTP."""

by_serve = pytest.mark.parametrize("url", WAYS[:1], indirect=True)
GOAL, LOAN = "The football team scores a goal.", "The bank pays interest on a loan."


def config(model_id: str, recipe: str, **options: Any) -> dict[str, Any]:
    """Of a model that `recipes` makes."""
    return {
        "model_loading_config": {"model_id": model_id, "model_source": str(model(recipe))},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {"kv_cache_memory_bytes": 1 << 26} | options,
    }


@contextmanager
def served(
    name: str, configs: list[dict[str, Any]], serve_url: str, storage: Path
) -> Iterator[dict[str, str]]:
    """The URL of the application for each of WAYS. storage: of its batches."""
    port = unused()
    config = {"llm_configs": configs, "gateway": {"port": port}, "jobs": {"storage": str(storage)}}
    app = build_openai_app(config)
    try:
        serve.run(app, name=name, route_prefix=f"/{name}")
        yield dict(zip(WAYS, [f"{serve_url}/{name}", f"http://127.0.0.1:{port}"], strict=True))
    finally:
        serve.delete(name)


def ask(url: str, path: str, model_id: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": model_id} | body, timeout=60)


def ask_with_id(url: str, path: str, model_id: str, body: dict[str, Any]) -> Any:
    """The answer, which has the request's id."""
    mine = f"my-{path.replace('/', '-')}"
    asked = {"model": model_id} | body
    answer = httpx.post(f"{url}{path}", json=asked, headers={"x-request-id": mine}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == mine
    return answer.json()


def best(answer: Any) -> int:
    return answer["results"][0]["index"]


def likest(answer: Any) -> int:
    found = [row["score"] for row in answer["data"]]
    return found.index(max(found))


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5


def handle(application: str, model_id: str) -> DeploymentHandle:
    return serve.get_deployment_handle(f"LLMServer:{model_id}", application).options(stream=True)


def events(batches: Any) -> list[dict[str, Any]]:
    """Of a stream that came by handle."""
    lines = [line for batch in batches for event in batch for line in event.splitlines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def batch(url: str, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """The bodies that answer these, asked as lines of one batch by OpenAI's client."""
    client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    rows = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": body})
        for number, body in enumerate(bodies)
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(rows).encode()), purpose="batch")
    options: Any = {"endpoint": path, "completion_window": "24h"}
    made = client.batches.create(input_file_id=file.id, **options)
    while made.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        made = client.batches.retrieve(made.id)
    failed = client.files.content(made.error_file_id).text if made.error_file_id else made.errors
    assert (made.status, failed) == ("completed", None)
    answers = [json.loads(row) for row in client.files.content(made.output_file_id or "").text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(len(bodies))]
    assert {answer["response"]["status_code"] for answer in answers} == {200}
    return [answer["response"]["body"] for answer in answers]
