"""Disturbs a scenario at each of its awaits in turn, in virtual time.

    def test_nothing_is_held_at_the_end():
        assert disturbed(scenario) > 40  # awaits that were reached

`scenario(start)` is a coroutine function that begins its work with `start(coroutine)`, as with
`create_task`, awaits the end of it, and asserts what holds at the end. It runs once as it is, some times with
the tasks that are ready in another order, and then once for each await that its started work reached and each
disturbance: the work is cancelled there while it waits; is cancelled at the moment in which what it waits for
is there; waits for 100 s longer; or, with `failing`, gets an error from what it called. Time passes only when
nothing else is to do, and a wait that nobody ends is an error at once (`Stuck`).

`python -m tests.interleaving` runs all scenarios and prints how many awaits of each folder they reach.
"""

from __future__ import annotations

import ast
import asyncio
import contextvars
import functools
import gc
import itertools
import os
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import penstock

Start = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
Scenario = Callable[[Start], Awaitable[None]]

LONG_S = 100.0
THREAD_S, ABANDONED_S = 0.001, 5.0
"""For a call on a thread; for one whose caller has been cancelled."""

ORDERS = 5
"""In how many orders of ready tasks a scenario runs without a disturbance."""
SEED = int(os.environ.get("INTERLEAVING_SEED", "0"))
"""Of the order of ready tasks in all other runs; 0: as they became ready."""

SOURCES = str(Path(penstock.__file__).parent)
reached = set[tuple[str, int]]()
"""Files and lines of `SOURCES` at which a task of any scenario waited."""

_started = contextvars.ContextVar("started", default=False)  # by `start`, or by what that began


class Stuck(AssertionError):
    """Something waits, and nothing will ever wake it."""


class _Selector(selectors.DefaultSelector):
    loop: Loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if found := super().select(0):
            return found
        if self.loop.in_threads:
            return super().select(0.001)
        self.loop.idle(timeout)
        return []


class Loop(asyncio.SelectorEventLoop):
    """Its time is virtual. Sockets are real, as are threads of executors: time does not pass while one works.

    seed: of the order of tasks that are ready at the same time; 0: as they became ready.
    """

    def __init__(self, plan: _Plan | None = None, seed: int = 0) -> None:
        self.now = 0.0
        self.in_threads = 0
        self._plan = plan or _Plan(None)
        self._order = random.Random(seed) if seed else None
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def idle(self, timeout: float | None) -> None:
        """Lets time pass, at most so much. Raises: Stuck."""
        if timeout is None:
            raise Stuck("nothing will ever wake what waits")
        self.now += timeout

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """A task that the work begins itself is disturbed if the plan names it."""
        if not isinstance(coro, _Watched):
            is_named = _started.get() and getattr(coro, "__name__", "") in self._plan.also
            coro = _Watched(coro, self._plan if is_named else None, is_own=False)
        coro.task = super().create_task(coro, **options)
        return coro.task

    def _run_once(self) -> None:
        if self._order is not None:
            ready: Any = self._ready  # pyright: ignore[reportAttributeAccessIssue]
            groups = [(is_step, [*group]) for is_step, group in itertools.groupby(ready, _is_step)]
            ready.clear()
            for (
                is_step,
                group,
            ) in groups:  # other callbacks keep their order, also to the tasks that they wake
                ready.extend(self._order.sample(group, len(group)) if is_step else group)
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]

    def run_in_executor(self, executor: Executor | None, func: Any, *args: Any) -> asyncio.Future[Any]:
        """The default executor's threads are virtual, too: they take a while, and longer if nobody waits."""
        if executor is not None:
            done = super().run_in_executor(executor, func, *args)
            self.in_threads += 1
            done.add_done_callback(self._thread_ended)
            return done
        result = self.create_future()

        def work() -> None:
            asyncio._set_running_loop(None)
            try:
                outcome, settle = func(*args), result.set_result
            except BaseException as error:
                outcome, settle = error, result.set_exception
            finally:
                asyncio._set_running_loop(self)
            if not result.done():
                settle(outcome)

        def goes_on(_: object) -> None:
            timer.cancel()  # of a call that fails in place of it
            if result.cancelled():
                self.call_later(ABANDONED_S, work)

        timer = self.call_later(THREAD_S, work)
        result.add_done_callback(goes_on)
        return result

    def _thread_ended(self, _: object) -> None:
        self.in_threads -= 1


def _is_step(handle: Any) -> bool:
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


@dataclass
class _Plan:
    """Counts awaits. disturb: what to do at the await of this number. also: tasks of the work's own, by the
    names of their functions, whose awaits count, too; nobody cancels them, so neither does a disturbance.
    """

    disturb: Disturbance | None
    also: Container[str] = ()
    number: int = -1
    reached: int = 0
    disturbed: list[str] = field(default_factory=list)
    awaits: list[tuple[set[str], bool]] = field(default_factory=list)

    def at(self, watched: _Watched, awaited: Any, frames: list[FrameType]) -> Any:
        number, self.reached = self.reached, self.reached + 1
        if self.disturb is None:
            self.awaits.append(({frame.f_code.co_name for frame in frames}, watched.is_own))
        if self.disturb is None or number != self.number:
            return awaited
        where = " < ".join(f"{Path(f.f_code.co_filename).name}:{f.f_lineno}" for f in frames[:-4:-1])
        self.disturbed.append(f"{self.disturb.__name__} at await {number}, {where}")
        return self.disturb(watched, awaited)


def cancelled(watched: _Watched, awaited: Any) -> Any:
    """While it waits: before anything else happens."""
    watched.task.get_loop().call_soon(watched.task.cancel)
    return awaited


def cancelled_when_woken(watched: _Watched, awaited: Any) -> Any:
    """What it waits for has come, and it has not run yet."""
    if awaited is None:  # sleep(0)
        return cancelled(watched, awaited)
    awaited.add_done_callback(lambda _: watched.task.cancel())
    return awaited


def held(watched: _Watched, awaited: Any) -> Any:
    """It goes on long after what it waits for has come."""
    loop = watched.task.get_loop()
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


def failing(error: Exception, *functions: str) -> Disturbance:
    """At an await within one of `functions`, which may raise it: it gets `error` in place of the result."""

    def fails(watched: _Watched, awaited: Any) -> Any:
        raised = type(error)(*error.args)
        if awaited is None or isinstance(awaited, asyncio.Task):
            watched.error = raised
        else:
            watched.task.get_loop().call_soon(lambda: awaited.done() or awaited.set_exception(raised))
        return awaited

    setattr(fails, "within", set(functions))  # noqa: B010 - of a function
    return fails


Disturbance = Callable[["_Watched", Any], Any]
CANCELS: tuple[Disturbance, ...] = (cancelled, cancelled_when_woken)
DISTURBANCES: tuple[Disturbance, ...] = (*CANCELS, held)


class _Watched(Coroutine[Any, Any, Any]):
    """A coroutine that shows its awaits to the plan, and notes where it waits. error: what it gets next."""

    task: asyncio.Task[Any]

    def __init__(
        self, coroutine: Coroutine[Any, Any, Any], plan: _Plan | None, *, is_own: bool = True
    ) -> None:
        self._coroutine, self._plan, self.is_own = coroutine, plan, is_own
        self.error: Exception | None = None
        self.__name__ = getattr(coroutine, "__name__", "?")
        self.__qualname__ = getattr(coroutine, "__qualname__", "?")

    def send(self, value: Any) -> Any:
        if (error := self.error) is not None:
            return self.throw(error)
        return self._shown(self._coroutine.send(value))

    def throw(self, *error: Any) -> Any:
        self.error = None
        return self._shown(self._coroutine.throw(*error))

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        raise NotImplementedError

    def _shown(self, awaited: Any) -> Any:
        frames = list(_frames(self._coroutine))
        for frame in frames:
            if frame.f_code.co_filename.startswith(SOURCES):
                reached.add((frame.f_code.co_filename, frame.f_lineno))
        return awaited if self._plan is None else self._plan.at(self, awaited, frames)


def _frames(waiting: Any) -> Iterator[FrameType]:
    """Of a coroutine that waits, and of what it waits for, down to the innermost."""
    while waiting is not None:
        kind = next((kind for kind in ("cr", "ag", "gi") if hasattr(waiting, f"{kind}_frame")), None)
        if kind is None:  # what an async generator's methods return names it to the collector alone
            referents = gc.get_referents(waiting) if "async_generator" in type(waiting).__name__ else []
            waiting = next((one for one in referents if hasattr(one, "ag_frame")), None)
            continue
        if (frame := getattr(waiting, f"{kind}_frame")) is not None:
            yield frame
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")


def _run(scenario: Scenario, plan: _Plan, seed: int = SEED) -> None:
    random.seed(0)
    loop = Loop(plan, seed)
    asyncio.set_event_loop(loop)
    faults: list[str] = []
    loop.set_exception_handler(lambda _, context: faults.append(str(context)))
    began_s = time.time()

    def start(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(_started.set, True)
        return loop.create_task(_Watched(coroutine, plan), context=context)

    clocks = mock.patch.multiple(time, monotonic=loop.time, time=lambda: began_s + loop.now)
    try:
        main = loop.create_task(_awaited(scenario(start)))
        with clocks:
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


def disturbed(
    scenario: Scenario, disturbances: tuple[Disturbance, ...] = DISTURBANCES, also: Container[str] = ()
) -> int:
    """Returns how many awaits were reached. also: functions whose tasks, which the work begins itself, are
    held or fail, too. Raises: AssertionError that says where it was disturbed.
    """
    first = _Plan(None, also)
    _run(scenario, first, 0)
    plain = _Plan(None, also) if SEED else first
    if SEED:
        _run(scenario, plain)
    for seed in range(1, ORDERS + 1):
        try:
            _run(scenario, _Plan(None, also), SEED + seed)
        except BaseException as error:
            raise AssertionError(f"in order {SEED + seed}: {error!r}") from error
    for disturbance in disturbances:
        within = getattr(disturbance, "within", None)
        for number, (functions, is_own) in enumerate(plain.awaits):
            if (within is not None and not within & functions) or not (is_own or disturbance not in CANCELS):
                continue
            plan = _Plan(disturbance, also, number)
            try:
                _run(scenario, plan)
            except BaseException as error:
                raise AssertionError(f"{plan.disturbed or plan}: {error!r}") from error
    return first.reached


def virtually(scenario: Scenario, seed: int = 0) -> None:
    """Runs it once, undisturbed. seed: of the order of tasks that are ready at the same time."""
    _run(scenario, _Plan(None), seed)


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


def awaits_reached() -> str:
    """A line for each folder: of how many awaits in its files a scenario has reached how many."""
    counts, found = Counter[str](), Counter[str]()
    for path in sorted(Path(SOURCES).rglob("*.py")):
        parts = path.relative_to(SOURCES).parts[:-1]
        folder = "/".join(parts[:2] if parts[:1] == ("serve",) else parts[:1])
        for lines in map(_lines, ast.walk(ast.parse(path.read_text()))):
            counts[folder] += bool(lines)
            found[folder] += any((str(path), line) in reached for line in lines)
    return "\n".join(
        f"{folder or '.'}: {found[folder]} of {counts[folder]}" for folder in counts if found[folder]
    )


def _lines(node: ast.AST) -> range:
    """Those on which it waits; none for what is no await."""
    if isinstance(node, ast.AsyncWith):
        return range(node.lineno, node.body[0].lineno)
    return range(node.lineno, node.lineno + 1) if isinstance(node, ast.Await | ast.AsyncFor) else range(0)


def main() -> int:
    import interleaving  # as the tests know it
    import pytest

    tests = Path(__file__).parent
    files = [str(path) for path in tests.rglob("test_*.py") if "from interleaving import" in path.read_text()]
    code = pytest.main(["-q", "-m", "not full", "-k", "wherever", *files, *sys.argv[1:]])
    print(interleaving.awaits_reached())
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
