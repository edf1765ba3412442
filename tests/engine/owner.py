"""A program that owns an engine: of the model `argv[1]`, or of the child that `argv[2:]` starts.

It says each phase of its start, "ready", and waits.
"""

import asyncio
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # as pytest does for `tests`

from enginetest import child_config, vllm_config

from penstock.engines import engine_class


async def main() -> None:
    source, *command = sys.argv[1:]
    config = child_config(command) if command else vllm_config(source)
    engine = engine_class(config)(config)
    await engine.start(lambda phase: print(phase, flush=True))
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
