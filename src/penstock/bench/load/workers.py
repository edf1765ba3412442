"""The parent's side of the worker processes: starts them, runs levels on all at once, gathers outcomes."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import cast

import psutil

from penstock.bench.load.arrivals import Level
from penstock.bench.load.driver import LoadPlan
from penstock.bench.load.outcome import RequestOutcome, unpack
from penstock.bench.load.worker import Report, WorkerStrain, main
from penstock.errors import Error

_LEAD_S = 0.1  # from the word to the start of a level
_LOOK_S = 0.1
_START_S = 60.0


@dataclass(slots=True)
class Measured:
    """What all workers saw of one level. Times are of the monotonic clock; machine_cpu is 0 to 1."""

    level: Level
    start: float
    outcomes: list[RequestOutcome] = field(default_factory=list[RequestOutcome])
    strains: list[WorkerStrain] = field(default_factory=list[WorkerStrain])
    machine_cpu: float = 0.0
    open: int = 0
    stopped: bool = False


class LoadWorkers:
    """Worker processes for one plan. Close it."""

    def __init__(self, plan: LoadPlan) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        for index in range(plan.shares):
            here, there = spawn.Pipe()
            process = spawn.Process(target=main, args=(replace(plan, index=index), there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._stopping = False

    def ready(self) -> None:
        """Waits until all have started. Raises: Error."""
        deadline = time.monotonic() + _START_S
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise Error(f"A worker process did not start within {_START_S:g} s.")
            self._heard(pipe)

    def run(self, level: Level, look: Callable[[Measured], None]) -> Measured:
        """One level until the last answer has ended, or `stop`; `look` is called ten times a second.

        Raises: Error when a worker ends by itself.
        """
        psutil.cpu_percent()
        measured = Measured(level, time.monotonic() + _LEAD_S)
        for pipe in self._pipes:
            pipe.send((level, measured.start))
        open_by: dict[Pipe, int] = dict.fromkeys(self._pipes, 0)
        while len(measured.strains) < len(self._pipes):
            for pipe in cast("list[Pipe]", wait(self._pipes, _LOOK_S)):
                report = self._heard(pipe)
                measured.outcomes += unpack(report.outcomes)
                open_by[pipe] = report.open
                if report.strain is not None:
                    measured.strains.append(report.strain)
            measured.open = sum(open_by.values())
            look(measured)
        measured.machine_cpu = psutil.cpu_percent() / 100
        measured.stopped = self._stopping
        return measured

    def stop(self) -> None:
        """Ends the level that runs: open requests are hung up on and handed in as unfinished."""
        self._stopping = True
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # that one has ended; `run` tells
                pipe.send(None)

    def close(self) -> None:
        """Workers end with their pipes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()

    def _heard(self, pipe: Pipe) -> Report:
        try:
            return pipe.recv()
        except (EOFError, OSError) as error:
            process = self._processes[self._pipes.index(pipe)]
            process.join(1.0)
            raise Error(f"A worker process ended by itself, with code {process.exitcode}.") from error
