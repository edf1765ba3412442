"""One worker process: its share of every level, an outcome for every request, and how hard it was for itself.

The parent says when a level starts; times are the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe

import uvloop

from penstock.bench.load.arrivals import Level
from penstock.bench.load.client import Client
from penstock.bench.load.conversations import RequestWriter
from penstock.bench.load.driver import LevelRun, LoadPlan
from penstock.bench.load.outcome import pack

_REPORT_S = 0.2
_BEAT_S = 0.02


@dataclass(frozen=True, slots=True)
class WorkerStrain:
    """One worker's measured time. cpu: share of one core. lags_s: how late each beat of the loop was."""

    cpu: float
    lags_s: tuple[float, ...]


class LagProbe:
    """Beats from its making on; what is before `begin` (monotonic clock) is not counted."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._lags: list[float] = []
        self._from = (time.monotonic(), time.process_time())
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        await asyncio.sleep(max(0.0, self._begin - time.monotonic()))
        self._from = (time.monotonic(), time.process_time())
        while True:
            due = time.monotonic() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._lags.append(max(0.0, time.monotonic() - due))

    def end(self) -> WorkerStrain:
        self._task.cancel()
        began, spent = self._from
        wall_s = time.monotonic() - began
        return WorkerStrain((time.process_time() - spent) / wall_s if wall_s else 0.0, tuple(self._lags))


Order = tuple[Level, float] | None
"""Message of the parent: run your share of this level from that time on; None: close all connections, and
report what you have.
"""


@dataclass(frozen=True, slots=True)
class Report:
    """Outcomes since the last report, and requests that are open now.

    strain: with the last report of a level, and with the first of all, which says that the worker is ready.
    """

    outcomes: bytes
    open: int = 0
    strain: WorkerStrain | None = None


def main(plan: LoadPlan, pipe: Pipe) -> None:
    """The process. Ctrl-C in the terminal is the parent's business; without a parent there is none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each open request
    with suppress(BrokenPipeError):
        uvloop.run(_serve(plan, pipe))


async def _serve(plan: LoadPlan, pipe: Pipe) -> None:
    worker = Worker(plan, pipe)
    runs: asyncio.Queue[tuple[Level, float]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def obey(order: Order) -> None:
        if order is None:
            worker.stop()
        else:
            runs.put_nowait(order)

    def receive() -> None:  # a thread, because an event loop would make the pipe non-blocking, for `send` too
        while True:
            try:
                loop.call_soon_threadsafe(obey, pipe.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    gc.collect()
    gc.freeze()  # a look at everything that was imported would be a pause in somebody's stream
    pipe.send(Report(pack([]), strain=WorkerStrain(0.0, ())))
    while True:
        await worker.run(*await runs.get())


class Worker:
    """Runs its share of levels, one after the other."""

    def __init__(self, plan: LoadPlan, pipe: Pipe) -> None:
        self._plan, self._pipe = plan, pipe
        self._writer, self._client = RequestWriter(plan.work), Client(plan.target)
        self._level_run: LevelRun | None = None
        self._stopped = False

    async def run(self, level: Level, start: float) -> None:
        """One level; reports go to the parent meanwhile, and the last of them when all answers have ended."""
        level_run = self._level_run = LevelRun(self._plan, self._writer, self._client, level, start)
        lag_probe = LagProbe(start + level.warmup_s)
        reporter = asyncio.create_task(self._report_often(level_run))
        if not self._stopped:
            await level_run.run()
        reporter.cancel()
        self._level_run = None
        self._report(level_run, lag_probe.end())

    def stop(self) -> None:
        """Ends the level that runs; none will run after it."""
        self._stopped = True
        if self._level_run is not None:
            self._level_run.stop()

    async def _report_often(self, level_run: LevelRun) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self._report(level_run)

    def _report(self, level_run: LevelRun, strain: WorkerStrain | None = None) -> None:
        outcomes, level_run.outcomes = level_run.outcomes, []
        self._pipe.send(Report(pack(outcomes), level_run.open, strain))
