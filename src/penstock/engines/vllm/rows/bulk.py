"""Runs blocking functions for many callers in few jobs of a pool of threads.

A job costs a hundred microseconds, whatever it does. So while one runs, calls wait for the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Generic, TypeVar

Made = TypeVar("Made")

_AT_A_TIME = 32
"""Calls in one job: the first of many rows reach the engine while the others wait."""


_DROPPED = RuntimeError("Its threads have ended.")


class Bulk(Generic[Made]):
    """Each call is a coroutine."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waiting: list[tuple[Callable[[], Made], asyncio.Future[Made]]] = []
        self._job: asyncio.Task[None] | None = None

    async def __call__(self, function: Callable[[], Made]) -> Made:
        """Raises: what the function raises."""
        made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self._waiting.append((function, made))
        if self._job is None or self._job.done():
            self._job = asyncio.create_task(self._run())
        return await made

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            calls, self._waiting = self._waiting[:_AT_A_TIME], self._waiting[_AT_A_TIME:]
            calls = [call for call in calls if not call[1].done()]  # cancelled
            functions = [function for function, _ in calls]
            outcomes: list[Made | Exception] = [_DROPPED] * len(calls)
            with suppress(RuntimeError):  # the pool is shut down
                running = loop.run_in_executor(self._executor, _outcomes, functions)
                await asyncio.wait({running})
                if not running.cancelled():  # as where vLLM replaces threads that are stuck
                    outcomes = running.result()
            for (_, made), outcome in zip(calls, outcomes, strict=True):
                if made.done():
                    continue
                if isinstance(outcome, Exception):
                    made.set_exception(outcome)
                else:
                    made.set_result(outcome)


def _outcomes(functions: list[Callable[[], Made]]) -> list[Made | Exception]:
    outcomes = list[Made | Exception]()
    for function in functions:
        try:
            outcomes.append(function())
        except Exception as error:  # handed to the caller of this one
            outcomes.append(error)
    return outcomes
