"""A program that owns an engine of the model `argv[1]`: says each phase of its start, "ready", and waits."""

import asyncio
import sys

from enginetest import vllm_config

from penstock.engines.vllm.engine import VLLMEngine


async def main() -> None:
    engine = VLLMEngine(vllm_config(source=sys.argv[1]))
    await engine.start(lambda phase: print(phase, flush=True))
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
