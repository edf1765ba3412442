"""A simulated engine behind plain HTTP: `python -m benchmarks.simulated PORT '{"step_base_ms": 5}'`."""

from __future__ import annotations

import asyncio
import json
import sys

import uvicorn

from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine


async def serve(port: int, options: dict) -> None:
    model = {"model_id": "sim"}
    engine = SimEngine(LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs=options))
    await engine.start()
    config = uvicorn.Config(engine.app(), port=port, log_level="error", interface="asgi3", lifespan="off")
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), json.loads(sys.argv[2])))
