"""A bare `vllm serve` and a gateway before a replica, with the same model and the same engine arguments."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from jobs_served import JobsServed
from models import model
from served import NODE, Served, until
from tests.device import DEVICE
from tests.ports import unused

from penstock.config import LLMConfig
from penstock.data.backends.protocol import Response
from penstock.data.backends.replica import ReplicaClient
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine import Progress, no_progress
from penstock.engines import engine_class
from penstock.engines.process.child import Child
from penstock.layers.stack import stacked
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica.tiers.controller import targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.transport import link
from penstock.transport.address import Address

START_S = 300
WINDOW = 512
ARGUMENTS: dict[str, Any] = {
    "max_model_len": WINDOW,
    "block_size": 32,
    "kv_cache_memory_bytes": 1 << 26,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "distributed_executor_backend": "uni",
    "enable_tokenizer_info_endpoint": True,
    "enable_prefix_caching": False,  # so that earlier requests change no answer
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Pair:
    """Both servers, and Penstock's Files and Batches; the model is `m`."""

    vllm: httpx.AsyncClient
    penstock: httpx.AsyncClient
    jobs: JobsServed


class Rows:
    """A batch's backend: rows go to the replica as they go to those of a deployment, one at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def start(self, progress: Progress = no_progress) -> None:
        self._client = ReplicaClient(self._address, NODE, "batch", lambda: None)
        await until(lambda: self._client.ready)

    async def stop(self) -> None:
        await self._client.close()

    async def send(self, request: RowRequest) -> Response:
        body = with_fields(request.body, {"model": request.model or "m"})
        return await self._client.send(request.path, body, None)

    def available_slots(self, in_flight: int) -> int:
        return 1 - in_flight


@asynccontextmanager
async def beside(name: str, folder: Path, **more: Any) -> AsyncIterator[Pair]:
    """Starts both with the model of `recipes/NAME`. more: engine arguments."""
    arguments = ARGUMENTS | more
    async with (
        bare(str(model(name)), arguments) as vllm,
        gateway(str(model(name)), arguments, folder) as (penstock, jobs),
    ):
        yield Pair(vllm, penstock, jobs)


@asynccontextmanager
async def bare(source: str, arguments: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    port = unused()
    words = ["--model", source, "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
    for option, value in arguments.items():
        flag = option.replace("_", "-")
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += (
            [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", text]
        )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    child = Child([*command, "--disable-uvicorn-access-log"], ENVIRONMENT, grace_s=5)
    try:
        limits = httpx.Limits(keepalive_expiry=1)  # the server closes idle connections after 5 s
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=60, limits=limits
        ) as client:
            async with asyncio.timeout(START_S):
                while not await answers(client):
                    assert not child.ended.done(), child.last_words()
                    await asyncio.sleep(0.2)
            yield client
    finally:
        await child.stop()


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def gateway(
    source: str, arguments: dict[str, Any], folder: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, JobsServed]]:
    config = LLMConfig(
        model_loading_config={"model_id": "m", "model_source": source},
        accelerator_config={"kind": DEVICE},
        engine_kwargs=arguments,
    )
    engine, served = engine_class(config)(config), Served()
    turns = Turns(BatchShare(engine.load, targets(config), time.monotonic))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", ENVIRONMENT["OMP_NUM_THREADS"])
            await engine.start()
        app = stacked(engine, config, adapters=None, preprocessor=None, postprocessor=None)
        await served.gateway(ServedModel.of(config))
        listener = await served.app(
            ByClass(app, turns),
            "m",
            load=engine.load,
            hello=lambda: link.Hello("m", engine.max_model_len(), engine.kv_tokens()),
            batch=turns.share,
        )
        jobs = JobsServed(served, folder, {}, backend=lambda: Rows(listener.address))
        await jobs.start()
        async with served.http() as client:
            yield client, jobs
        await jobs.stop()
    finally:
        await served.close()
        await engine.stop()
