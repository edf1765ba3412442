"""A program that owns an engine, for tests that kill it: says "starting" and "ready", then waits."""

import asyncio

from enginetest import vllm_config

from penstock.engines.vllm.engine import VLLMEngine


async def main() -> None:
    engine = VLLMEngine(vllm_config())
    await engine.start(lambda phase: print(phase, flush=True))
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
