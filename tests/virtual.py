"""Virtual time for loops, threads and whole commands: hours take no time, and each run is the same.

Threads of jobs are real ones of which one runs at a time, until it waits; it goes on when its time has come
and no loop has anything else to do. So a run depends on nothing but what it is given.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from interleaving import Loop, Stuck

from penstock.data.job import pending
from penstock.data.journal import lock, segment, segment_reader
from penstock.jobs import storage

START_S = 1_700_000_000


class Clock:
    """Seconds since its start, of all loops and threads. limit: a wait beyond it will never end."""

    def __init__(self) -> None:
        self.now, self.limit = 0.0, math.inf
        self.threads: list[Thread] = []

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.step(until):
            pass
        self.now = max(self.now, until)

    def step(self, until: float) -> bool:
        """Lets the next thread that is due by then run; whether there is one."""
        due = min(self.threads, key=lambda one: one.due, default=None)
        if due is None or due.due > min(until, self.limit):
            return False
        self.now = max(self.now, due.due)
        due.run()
        return True

    def kill_threads(self, reason: type[BaseException]) -> None:
        """Those of a process that was killed, where they wait."""
        for thread in list(self.threads):
            thread.killed_by = reason
            thread.run()


class Thread:
    """As `threading.Thread`."""

    def __init__(self, clock: Clock, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._clock, self._target = clock, target
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._real = threading.Thread(target=self._work, name=name, daemon=daemon)
        setattr(self._real, "virtual", self)  # noqa: B010 - of another class
        self.due, self.waits_for = 0.0, None
        self.killed_by: type[BaseException] | None = None

    def start(self) -> None:
        self.due = self._clock.now
        self._clock.threads.append(self)
        self._real.start()

    def join(self) -> None:
        while self in self._clock.threads:
            if not self._clock.step(math.inf):
                raise Stuck(f"nothing will ever end the thread '{self._real.name}'")
        self._real.join()

    def run(self) -> None:
        """Until it waits, or ends."""
        self.due = math.inf
        self._go.release()
        self._waits.acquire()

    def wait(self, event: Event, timeout: float | None) -> None:
        self.due, self.waits_for = math.inf if timeout is None else self._clock.now + timeout, event
        self._waits.release()
        self._go.acquire()
        self.waits_for = None
        if self.killed_by is not None:
            raise self.killed_by

    def _work(self) -> None:
        self._go.acquire()
        try:
            if self.killed_by is None:
                self._target()
        finally:
            self._clock.threads.remove(self)
            self._waits.release()


class Event:
    """As `threading.Event`; only a `Thread` may wait for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._set = clock, False

    def set(self) -> None:
        self._set = True
        for thread in self._clock.threads:
            if thread.waits_for is self:
                thread.due = self._clock.now

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            getattr(threading.current_thread(), "virtual").wait(self, timeout)  # noqa: B009
        return self._set


class Inline:
    """As `ThreadPoolExecutor`: all is done at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments))
        except BaseException as error:
            done.set_exception(error)
        return done

    def map(self, call: Callable[[Any], Any], values: Iterable[Any]) -> Iterator[Any]:
        return map(call, values)


class ClockLoop(Loop):
    """Its time is that of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        super().__init__()

    def time(self) -> float:
        return self.clock.now

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.SelectorEventLoop.create_task(self, coro, **options)  # nothing watches its awaits

    def idle(self, timeout: float | None) -> None:
        if self.clock.step(math.inf if timeout is None else self.clock.now + timeout):
            return
        if timeout is None or self.clock.now > self.clock.limit:
            super().idle(None)
        self.clock.now += timeout or 0.0


@contextmanager
def virtual(clock: Clock) -> Generator[None]:
    """Whatever runs in the block takes its time from `clock`, and ids from Python's random numbers.

    Threads that others have left in this process, of Ray for instance, keep the real time.
    """
    main = threading.get_ident()

    def ours(virtual: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            current = threading.current_thread()
            return (virtual if current.ident == main or hasattr(current, "virtual") else real)(*arguments)

        return call

    def run(main: Any) -> Any:
        with asyncio.Runner(loop_factory=partial(ClockLoop, clock)) as runner:
            return runner.run(main)

    threads = {"Thread": partial(Thread, clock), "Event": partial(Event, clock), "Lock": threading.Lock}
    with pytest.MonkeyPatch.context() as patch:
        for module in (segment, lock):
            patch.setattr(module, "threading", SimpleNamespace(**threads))
        for module in (pending, segment_reader, storage):
            patch.setattr(module, "ThreadPoolExecutor", Inline)
        patch.setattr(time, "monotonic", ours(lambda: clock.now, time.monotonic))
        patch.setattr(time, "time", ours(lambda: START_S + clock.now, time.time))
        patch.setattr(time, "time_ns", ours(lambda: int(1e9 * (START_S + clock.now)), time.time_ns))
        patch.setattr(time, "sleep", ours(clock.sleep, time.sleep))
        patch.setattr(uuid, "uuid4", ours(lambda: uuid.UUID(int=random.getrandbits(128)), uuid.uuid4))
        patch.setattr(asyncio, "run", run)
        yield
