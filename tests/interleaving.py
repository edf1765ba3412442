"""Disturbs a scenario at each of its awaits in turn, in virtual time.

    def test_nothing_is_held_at_the_end():
        assert disturbed(scenario) > 40  # awaits that were reached

`scenario(start)` is a coroutine function that begins its work with `start(coroutine)`, as with
`create_task`, awaits the end of it, and asserts what holds at the end. It runs once as it is, and then once
for each await that its started work reached and each disturbance: the work is cancelled there while it
waits; is cancelled at the moment in which what it waits for is there; or waits for 100 s longer. Time passes
only when nothing else is to do, and a wait that nobody ends is an error at once (`Stuck`).
"""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

Start = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
Scenario = Callable[[Start], Awaitable[None]]

LONG_S = 100.0


class Stuck(AssertionError):
    """Something waits, and nothing will ever wake it."""


class _Selector(selectors.DefaultSelector):
    loop: Loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if found := super().select(0):
            return found
        if self.loop.in_threads:
            return super().select(0.001)
        if timeout is None:
            raise Stuck("nothing will ever wake what waits")
        self.loop.now += timeout
        return []


class Loop(asyncio.SelectorEventLoop):
    """Its time is virtual. Sockets and threads are real: time does not pass while a thread works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.in_threads = 0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> asyncio.Future[Any]:
        done = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        done.add_done_callback(self._thread_ended)
        return done

    def _thread_ended(self, _: object) -> None:
        self.in_threads -= 1


@dataclass
class _Plan:
    """Counts awaits. disturb: what to do at the await of this number."""

    disturb: Disturbance | None
    number: int = -1
    reached: int = 0
    disturbed: list[str] = field(default_factory=list)

    def at(self, task: asyncio.Task[Any], awaited: Any, where: str) -> Any:
        number, self.reached = self.reached, self.reached + 1
        if self.disturb is None or number != self.number:
            return awaited
        self.disturbed.append(f"{self.disturb.__name__} at await {number}, {where}")
        return self.disturb(task, awaited)


def cancelled(task: asyncio.Task[Any], awaited: Any) -> Any:
    """While it waits: before anything else happens."""
    task.get_loop().call_soon(task.cancel)
    return awaited


def cancelled_when_woken(task: asyncio.Task[Any], awaited: Any) -> Any:
    """What it waits for has come, and it has not run yet."""
    if awaited is None:  # sleep(0)
        return cancelled(task, awaited)
    awaited.add_done_callback(lambda _: task.cancel())
    return awaited


def held(task: asyncio.Task[Any], awaited: Any) -> Any:
    """It goes on long after what it waits for has come."""
    loop = task.get_loop()
    later = loop.create_future()

    def come(_: object = None) -> None:
        loop.call_later(LONG_S, lambda: later.done() or later.set_result(None))

    if awaited is None:
        come()
    else:
        awaited._asyncio_future_blocking = False  # the task waits for another one
        awaited.add_done_callback(come)
        later.add_done_callback(lambda _: later.cancelled() and awaited.cancel())
    later._asyncio_future_blocking = True
    return later


Disturbance = Callable[[asyncio.Task[Any], Any], Any]
DISTURBANCES: tuple[Disturbance, ...] = (cancelled, cancelled_when_woken, held)


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that shows its awaits to the plan."""

    task: asyncio.Task[Any]

    def __init__(self, coroutine: Coroutine[Any, Any, Any], plan: _Plan) -> None:
        self._coroutine, self._plan = coroutine, plan

    def send(self, value: Any) -> Any:
        return self._shown(self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        return self._shown(self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError

    def _shown(self, awaited: Any) -> Any:
        return self._plan.at(self.task, awaited, _where(self._coroutine))


def _where(coroutine: Any) -> str:
    """The innermost line that awaits."""
    found = "?"
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        found = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        coroutine = coroutine.cr_await
    return found


def _run(scenario: Scenario, plan: _Plan) -> None:
    random.seed(0)
    loop = Loop()
    asyncio.set_event_loop(loop)
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(str(context)))

    def start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        watched = _Watched(coroutine, plan)
        watched.task = loop.create_task(watched)
        return watched.task

    try:
        main = loop.create_task(_awaited(scenario(start)))
        loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks are left: {left}"
        assert not faults, faults
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        asyncio.set_event_loop(None)


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable


def disturbed(scenario: Scenario, disturbances: tuple[Disturbance, ...] = DISTURBANCES) -> int:
    """Returns how many awaits were reached. Raises: AssertionError that says where it was disturbed."""
    plain = _Plan(None)
    _run(scenario, plain)
    for disturbance in disturbances:
        for number in range(plain.reached):
            plan = _Plan(disturbance, number)
            try:
                _run(scenario, plan)
            except BaseException as error:
                raise AssertionError(f"{plan.disturbed or plan}: {error!r}") from error
    return plain.reached


def ended(*expected: type[BaseException]) -> Callable[[asyncio.Task[Any]], Any]:
    """Reads a task's end: its result, or its error if that is expected, or its cancellation."""
    return functools.partial(_ended, expected)


def _ended(expected: tuple[type[BaseException], ...], task: asyncio.Task[Any]) -> Any:
    assert task.done()
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    if error is None:
        return task.result()
    assert isinstance(error, expected), error
    return error
