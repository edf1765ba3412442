"""The Files and Batches APIs in a process of its own, to be stopped, woken and killed."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import openai
import uvloop
from replica_process import FORKS

from penstock.processes import lifeline


class JobsProcess:
    """url: of the gateway that answers rows. storage: a folder or a URL. Clients: as of `JobsServed`."""

    def __init__(self, url: str, storage: str) -> None:
        hears, tells = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(
            target=_run, args=(tells, os.getpid(), dict(os.environ), url, storage), daemon=True
        )
        self._process.start()
        tells.close()
        self._hears = hears

    async def ready(self) -> JobsProcess:
        self.url: str = await asyncio.to_thread(self._hears.recv)
        return self

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)

    def freeze(self) -> None:
        """No thread of it runs until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _run(tells: Connection, owner: int, environment: dict[str, str], url: str, storage: str) -> None:
    lifeline.tie_to(owner)
    os.environ.clear()
    os.environ.update(environment)
    uvloop.run(_serve(tells, url, storage))


async def _serve(tells: Connection, url: str, storage: str) -> None:
    from jobs_served import JobsServed

    gateway: Any = SimpleNamespace(url=url)
    jobs = JobsServed(gateway, storage, {})
    await jobs.start()
    tells.send(jobs.url)
    await asyncio.Event().wait()
