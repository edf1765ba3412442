"""Configs of the engines under test, and how tests speak to them: over a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import uvicorn
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from tests.device import DEVICE, SHARE

from penstock.asgi import TRUSTED, ASGIApp, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.engine import Engine
from penstock.engines import engine_class
from penstock.engines.process.engine import ProcessEngine

MODEL_ID = "model:under/test"
ALIAS = "gpt-4o-mini"
WINDOW = 2048
BLOCK_SIZE = 32
KV_BLOCKS = 160
"""So few that a handful of long prompts overwrite each other in the cache."""

SEATS = 32
"""Requests that run at a time in `demo`."""


def vllm_config(source: object = "demo", **engine_kwargs: object) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": MODEL_ID, "model_source": source},
        aliases=[ALIAS],
        accelerator_config={"kind": DEVICE},
        engine_kwargs={"max_model_len": WINDOW, "block_size": BLOCK_SIZE} | SHARE | engine_kwargs,
    )


def vllm_config_with_small_cache(**engine_kwargs: object) -> LLMConfig:
    """vLLM keeps one block for itself."""
    size = {"kv_cache_memory_bytes": 1 << 26, "num_gpu_blocks_override": KV_BLOCKS + 1}
    return vllm_config(**size, **engine_kwargs)


def sim_config(**engine_kwargs: object) -> LLMConfig:
    speed = {"step_base_ms": 1.0, "prefill_tokens_per_s": 1e6}
    cache = {"block_size": BLOCK_SIZE, "kv_tokens": BLOCK_SIZE * KV_BLOCKS}
    options = {"max_model_len": WINDOW} | speed | cache | engine_kwargs
    return LLMConfig(
        model_loading_config={"model_id": MODEL_ID},
        aliases=[ALIAS],
        llm_engine="sim",
        engine_kwargs=options,
    )


def process_config() -> LLMConfig:
    """vLLM's own server, as anybody runs it, with the sizes that the others have."""
    words = ["{python}", "-m", "vllm.entrypoints.openai.api_server", "--model", "{model}"]
    words += ["--served-model-name", "{model_id}", "--host", "{host}", "--port", "{port}"]
    words += ["--max-model-len", str(WINDOW), "--block-size", str(BLOCK_SIZE), "--enforce-eager"]
    words += ["--distributed-executor-backend", "uni", "--kv-cache-memory-bytes", str(1 << 26)]
    words += ["--num-gpu-blocks-override", str(KV_BLOCKS + 1), "--enable-lora", "--max-loras", "2"]
    words += ["--disable-uvicorn-access-log", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_API_KEY": "{api_key}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return child_config(words, model_source="demo", environment=environment)


SGLANG = Path(__file__).parents[2] / ".venv-sglang"
"""Made by `make sglang`; without it the tests of SGLang are left out."""


def sglang_config(source: object = "demo", **engine_kwargs: object) -> LLMConfig:
    """SGLang in the environment that `scripts/sglang` makes, with a cache of the same size."""
    options: dict[str, object] = {
        "python": str(SGLANG / "bin" / "python"),
        "context_length": WINDOW,
        "page_size": BLOCK_SIZE,
        "max_total_tokens": BLOCK_SIZE * KV_BLOCKS,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "tool_call_parser": "hermes",
        "disable_overlap_schedule": True,
        # Five long answers begin together, as in vLLM, though they would not fit at their ends.
        "environment": {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "64"},
    }
    return LLMConfig(
        model_loading_config={"model_id": MODEL_ID, "model_source": source},
        aliases=[ALIAS],
        llm_engine="sglang",
        accelerator_config={"kind": "cpu"},
        engine_kwargs=options | engine_kwargs,
    )


def child_config(
    command: Sequence[str], *, model_source: str | None = None, **engine_kwargs: object
) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": MODEL_ID, "model_source": model_source},
        aliases=[ALIAS],
        llm_engine="process",
        engine_kwargs={"command": list(command)} | engine_kwargs,
    )


CONFIGS = {
    "sim": sim_config,
    "vllm": vllm_config_with_small_cache,
    "process": process_config,
    **({"sglang": sglang_config} if (SGLANG / "ready").exists() else {}),
}


@dataclass(frozen=True)
class Served:
    """A started engine and a client of its app. registered: its metrics, if they are in this process."""

    engine: Engine
    http: httpx.AsyncClient
    registered: CollectorRegistry | None = None

    async def counted(self, name: str) -> float:
        """The sum of one of vLLM's metrics, as /metrics has it while no other engine starts in this process.

        vLLM then takes those of the engines before off the registry that /metrics shows.
        """
        if self.registered:
            text = generate_latest(self.registered).decode()
        else:
            text = (await self.http.get("/metrics")).text
        values = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
        assert values, f"no {name} is counted"
        return sum(values)

    @property
    def foreign(self) -> bool:
        """Whether it is another program, of which nothing is known but what it says over HTTP."""
        return isinstance(self.engine, ProcessEngine)


@asynccontextmanager
async def listening(app: ASGIApp, *, ours: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `app` on a real socket. ours: whether its requests are marked as those of a gateway are."""
    app = marked(app) if ours else app
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        lifespan="off",
        interface="asgi3",
        log_level="warning",
        timeout_keep_alive=60,  # longer than the client keeps a connection, or one may end as it is used
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([sock]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=180) as client:
        yield client
    server.should_exit = True
    await task


def marked(app: ASGIApp) -> ASGIApp:
    """Asked as by a gateway."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {TRUSTED: {}}
        await app(scope, receive, send)

    return asked


@asynccontextmanager
async def serve(config: LLMConfig) -> AsyncIterator[Served]:
    engine = engine_class(config)(config)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_API_KEY", "the gateway's, which no engine may ask for")
            before = set(REGISTRY._collector_to_names)
            await engine.start()
        registered = CollectorRegistry()
        for collector in set(REGISTRY._collector_to_names) - before:
            registered.register(collector)
        async with listening(engine.app()) as client:
            yield Served(engine, client, registered if registered._collector_to_names else None)
    finally:
        await engine.stop()
