"""What a preprocessor costs and saves as a deployment of its own, beside the same in the replica.

Two applications on one Ray cluster with the same simulated engine and the same preprocessor. Run
`python -m benchmarks.preprocessing` in the project's folder.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any

import httpx
import numpy as np
import ray
from PIL import Image
from ray import serve

from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine
from penstock.serve import GatewayConfig, LLMRouter, LLMServer

SIZES_MB = (1, 10, 50)
KINDS = ("numpy", "torch", "PIL")
ROUNDS = 20
BUSY_S = 0.5
PORTS = {"in the replica": 8941, "own deployment": 8942}


class Tells(SimEngine):
    """Answers where the picture's bytes lie: in Ray's shared memory, or in its own."""

    def generate(self, prompt: Any, params: Any, **more: Any) -> AsyncGenerator[Any, None]:
        media = prompt.get("multi_modal_data") if isinstance(prompt, dict) else None
        return super().generate(_place(media["image"]) if media else prompt, params, **more)


class Server(LLMServer):
    """With that engine."""

    async def __init__(self, llm_config: LLMConfig, **more: Any) -> None:
        await super().__init__(llm_config, engine_cls=Tells, **more)


def prepare(request: dict[str, Any]) -> Any:
    """`KIND MB`: such a picture, which is at hand. `busy`: Python for `BUSY_S`. Else the request."""
    kind, _, size = request["messages"][-1]["content"].partition(" ")
    if kind in KINDS:
        return {"prompt": "x", "multi_modal_data": {"image": picture(kind, int(size))}}
    if kind == "busy":
        until = time.thread_time() + BUSY_S
        while time.thread_time() < until:
            pass
    return request


@cache
def picture(kind: str, size_mb: int) -> Any:
    array = np.full((size_mb * 250_000, 4), 7, np.uint8)
    if kind == "PIL":
        return Image.fromarray(array.reshape(500, -1, 4))
    if kind == "torch":
        import torch

        return torch.from_numpy(array).float()[: len(array) // 4]  # as large: four bytes for each
    return array


def _place(image: Any) -> str:
    if isinstance(image, Image.Image):
        return "own"
    address = image.ctypes.data if isinstance(image, np.ndarray) else image.data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if first <= address < last:
                return "shared" if "plasma" in line else "own"
    return "unknown"


def deploy() -> None:
    """Ends when both answer."""
    for name, port in PORTS.items():
        own = name == "own deployment"
        config = LLMConfig(
            model_loading_config={"model_id": "m"},
            llm_engine="sim",
            engine_kwargs={"step_base_ms": 5.0, "prefill_tokens_per_s": 1e6},
            server_cls="benchmarks.preprocessing.Server",
            preprocessor="benchmarks.preprocessing:prepare",
            preprocessor_options={"num_replicas": 1} if own else None,
        )
        app = LLMRouter.as_deployment().bind([config], GatewayConfig(port=port))
        serve.run(app, name=f"app-{port}", route_prefix=None)


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


async def crossing(http: httpx.AsyncClient, text: str) -> tuple[float, str]:
    """Milliseconds of a request, median; where the picture lay."""
    took: list[float] = []
    where = ""
    for _ in range(ROUNDS + 3):
        began = time.perf_counter()
        answer = await http.post("/v1/chat/completions", json=body(text))
        took.append(time.perf_counter() - began)
        where = answer.json()["choices"][0]["message"]["content"]
    return statistics.median(took[3:]) * 1e3, where


async def gaps(http: httpx.AsyncClient, text: str) -> tuple[float, float]:
    """Milliseconds between the pieces of a stream, median and 99th in 100, beside requests of `text`."""
    stop = asyncio.Event()

    async def others() -> None:
        while not stop.is_set():
            await http.post("/v1/chat/completions", json=body(text))

    beside = asyncio.create_task(others())
    await asyncio.sleep(1.0)
    found: list[float] = []
    asked = body("word " * 600, stream=True, max_tokens=600)
    async with http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        last = time.perf_counter()
        async for _ in answer.aiter_raw():
            now = time.perf_counter()
            found.append(now - last)
            last = now
    stop.set()
    await beside
    found = sorted(found[1:])
    return statistics.median(found) * 1e3, found[len(found) * 99 // 100] * 1e3


async def measure() -> None:
    clients = {
        name: httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120)
        for name, port in PORTS.items()
    }
    print(
        "| picture | in the replica, ms | own deployment, ms | more | its bytes lie |\n|---|--:|--:|--:|---|"
    )
    for kind in KINDS:
        for size in SIZES_MB:
            ours, theirs = [await crossing(http, f"{kind} {size}") for http in clients.values()]
            print(
                f"| {kind}, {size} MB | {ours[0]:.1f} | {theirs[0]:.1f} "
                f"| {theirs[0] - ours[0]:.1f} | {theirs[1]} |",
                flush=True,
            )
    print("\n| between two tokens, p50 (p99) ms | beside `x` | beside `busy` |\n|---|--:|--:|")
    for name, http in clients.items():
        quiet, busy = await gaps(http, "x"), await gaps(http, "busy")
        print(f"| {name} | {quiet[0]:.1f} ({quiet[1]:.1f}) | {busy[0]:.1f} ({busy[1]:.1f}) |", flush=True)


def main() -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 30)
    try:
        serve.start(proxy_location="Disabled")
        deploy()
        asyncio.run(measure())
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
