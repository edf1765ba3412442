"""Load on an application that is deployed anew meanwhile, on a port of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray import serve
from tests.waiting import wait_until

from penstock.serve import LLMConfig, build_openai_app

APP = "renewed"
CLIENTS = 8
CONNECTIONS = 24
WORDS = 60
LONG = 6000  # words: a minute


class NeedsFile:
    """A preprocessor that cannot be made before its file is there."""

    def __init__(self, file: str) -> None:
        Path(file).read_text()

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        return request


async def no_request_is_lost(url: str, replicas: Sequence[int], gateways: int) -> None:
    """replicas: of one deployment after the other, each with other steps, so that all are started anew."""
    first, *others = replicas
    await asyncio.to_thread(deploy, url, first, 10.0, processes=gateways)
    for number, count in enumerate(others):
        async with load(url) as ends, httpx.AsyncClient(base_url=url, verify=False) as http:
            health = await http.get("/health")
            await asyncio.to_thread(deploy, url, count, 11.0 + number, processes=gateways)
        assert health.status_code == 200
        assert len(ends) > CLIENTS
        assert set(ends) == {"data: [DONE]"}


async def long_streams_move(url: str) -> None:
    """Both replicas are replaced by ones that give the same answers: streams go on there."""
    await asyncio.to_thread(deploy, url, 2, 10.0)
    body = {"model": "sim", "prompt": "on and on", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=90) as http, asyncio.TaskGroup() as clients:
        asking = [clients.create_task(http.post("/v1/completions", json=body)) for _ in range(CLIENTS)]
        await asyncio.sleep(1)
        await asyncio.to_thread(deploy, url, 2, 10.0, answers_as_before={"slo": {"ttft_ms": 60_000}})
        left = sum(not one.done() for one in asking)
    texts = {re.sub(r'"(id|created)":[^,]*,', "", (await one).text) for one in asking}
    assert [text.endswith("data: [DONE]\n\n") and text.count('"text"') for text in texts] == [LONG]
    async with httpx.AsyncClient(base_url=url) as http:
        figures = (await http.get("/metrics")).text
    found = [line for line in figures.splitlines() if "stream" in line and "_total" in line]
    assert left == CLIENTS, ("the update waited for streams", found)
    assert 'penstock_streams_continued_total{model="sim"} 0.0' not in figures, found
    assert "penstock_streams_cut_total{" not in figures


def deploy(
    url: str, replicas: int, step_ms: float, answers_as_before: dict[str, Any] | None = None, **gateway: Any
) -> None:
    config = LLMConfig(
        **(answers_as_before or {}),
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        engine_kwargs={"step_base_ms": step_ms},
        deployment_config={"num_replicas": replicas},
    )
    port = httpx.URL(url).port
    app = build_openai_app({"llm_configs": [config], "gateway": {"port": port, **gateway}})
    serve.run(app, name=APP, route_prefix=f"/{APP}")


def quick_changes_end_with_the_newest(url: str) -> None:
    """On all gateways, one of which is killed meanwhile. A model that is put back at once answers there."""

    def change(**models: dict[str, Any]) -> None:
        configs = [
            LLMConfig(model_loading_config={"model_id": name}, llm_engine="sim", **given)
            for name, given in models.items()
        ]
        gateway = {"port": httpx.URL(url).port, "processes": 2}
        app = build_openai_app({"llm_configs": configs, "gateway": gateway})
        serve.run(app, name=APP, route_prefix=None)

    def said(path: str, **more: Any) -> set[str]:
        """What all gateways say: one of so many connections reaches each."""
        try:
            return {httpx.request(url=url + path, timeout=30, **more).text for _ in range(CONNECTIONS)}
        except httpx.HTTPError as error:  # one was killed
            return {repr(error)}

    def named() -> set[tuple[str, ...]]:
        found = said("/v1/models", method="GET")
        return {tuple(re.findall(r'"id":"(\w+)"', text)) for text in found}

    change(a={}, b={})
    before = running()
    with ThreadPoolExecutor() as threads:
        changes = [threads.submit(change, a={"aliases": ["x"]}, b={})]
        time.sleep(0.3)
        changes.append(threads.submit(change, a={"aliases": ["y"]}, b={}))
        os.kill(min(before["LLMRouter"]), signal.SIGKILL)
    assert [one.result() for one in changes] == [None, None]
    wait_until(lambda: named() == {("a", "y", "b")} and len(running()["LLMRouter"]) == 2)
    after = running()
    assert {name for name in before if before[name] != after[name]} == {"LLMRouter"}
    assert len(before["LLMRouter"] & after["LLMRouter"]) == 1

    for _ in range(2):  # the second time Ray Serve has given the gateways handles to it before
        change(a={})
        change(a={}, b={})
        asked = {"model": "b", "prompt": "hello", "max_tokens": 1}
        answers = said("/v1/completions", method="POST", json=asked)
        assert all('"text"' in answer for answer in answers), answers


def running() -> dict[str, set[int]]:
    """Processes of each deployment."""
    found, title = defaultdict[str, set[int]](set), f"ray::ServeReplica:{APP}:"
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if line.startswith(title):
            found[line.removeprefix(title).split(".")[0].split(" ")[0]].add(process.pid)
    return dict(found)


@asynccontextmanager
async def load(url: str) -> AsyncIterator[list[str]]:
    stop, ends = asyncio.Event(), list[str]()
    async with asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(_client(url, stop, ends))
        try:
            yield ends
        finally:
            stop.set()


async def _client(url: str, stop: asyncio.Event, ends: list[str]) -> None:
    """Asks for one stream after the other, on connections that are kept, and notes how each ended."""
    body = {"model": "sim", "prompt": "on and on", "max_tokens": WORDS, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False) as http:
        while not stop.is_set():
            try:
                async with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = [line async for line in answer.aiter_lines()]
                ends.append(lines[-2] if answer.status_code == 200 else f"{answer.status_code} {lines}")
            except httpx.HTTPError as error:
                ends.append(repr(error))
