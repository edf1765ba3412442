"""A simulated replica in a process of its own. All are forked from one that has imported what they need."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import uvloop

from penstock.processes import lifeline

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["openai", "penstock.engines.sim.engine", "penstock.layers.adapters", "penstock.serve.gateway.app"]
)


def start(model_id: str, options: dict[str, Any]) -> tuple[BaseProcess, Connection]:
    """The process, and where it tells its address as soon as it listens."""
    hears, tells = FORKS.Pipe(duplex=False)
    told = (tells, os.getpid(), dict(os.environ), model_id, options)
    process = FORKS.Process(target=_run, args=told, daemon=True)
    process.start()
    tells.close()  # so that its end is heard
    return process, hears


def _run(tells: Connection, owner: int, environment: dict[str, str], *asked: Any) -> None:
    lifeline.tie_to(owner)
    os.environ.clear()
    os.environ.update(environment)
    uvloop.run(_serve(tells, *asked))


async def _serve(tells: Connection, model_id: str, options: dict[str, Any]) -> None:
    from served import Replica

    replica = await Replica.start(model_id, **options)
    tells.send(replica.address.to_metadata())
    await asyncio.Event().wait()
