"""A whole run: probe, then every level in turn, until the last or until the user has enough."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import FrameType

from penstock.bench.load.arrivals import Level
from penstock.bench.load.conversations import Workload
from penstock.bench.load.driver import LoadPlan
from penstock.bench.load.workers import LoadWorkers, Measured
from penstock.bench.run.figures import Figures, figures
from penstock.bench.run.probe import probe
from penstock.bench.run.settings import BenchSettings


@dataclass(slots=True)
class Result:
    """Everything that a report is made of."""

    settings: BenchSettings
    work: Workload
    notes: list[str]
    begun_at: float = field(default_factory=time.time)
    levels: list[tuple[Figures, Measured]] = field(default_factory=list[tuple[Figures, Measured]])

    @property
    def figures(self) -> list[Figures]:
        return [level for level, _ in self.levels]

    @property
    def stopped(self) -> bool:
        return any(level.stopped_early for level in self.figures)


class Watcher:
    """Follows a run; this one ignores it."""

    def found(self, result: Result) -> None: ...
    def begin(self, level: Level) -> None: ...
    def look(self, measured: Measured) -> None: ...
    def end(self, figures: Figures) -> None: ...


def run(settings: BenchSettings, watcher: Watcher) -> Result:
    """Raises: Error when the service cannot be used at all. Ctrl-C ends the run with the results so far."""
    work, notes = asyncio.run(probe(settings))
    result = Result(settings, work, notes)
    watcher.found(result)
    options = settings.options
    plan = LoadPlan(settings.target, work, options.timeout, options.think, shares=settings.workers)
    workers = LoadWorkers(plan)
    try:
        workers.ready()
        with _stopped_by_signals(workers.stop):
            for level in settings.levels:
                watcher.begin(level)
                measured = workers.run(level, watcher.look)
                result.levels.append((figures(measured, settings.slo), measured))
                watcher.end(result.figures[-1])
                if measured.stopped:
                    break
    finally:
        workers.close()
    return result


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Generator[None]:
    """The first Ctrl-C or SIGTERM calls `stop`; a second one is what it always is."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals; callers on other threads stop it otherwise
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(signum) for signum in signals]

    def restore() -> None:
        for signum, handler in zip(signals, before, strict=True):
            signal.signal(signum, handler)

    def first(signum: int, frame: FrameType | None) -> None:
        restore()
        stop()

    for signum in signals:
        signal.signal(signum, first)
    try:
        yield
    finally:
        restore()
