"""The order in which a thread pool tokenizes the texts of many requests.

vLLM queues texts as they come, all in one thread: a chat waits for every text of a request before it. Here
requests take turns, and long texts have a thread of their own. Knows neither vLLM nor HTTP.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

LONG = 1 << 15
"""Characters of a text that take some 10 ms, or more on a busy machine."""

_BASE = 1_000
"""Characters that a piece of work counts for besides its own."""


class Account:
    """How far one request is served. Units: characters, in the time of each queue that serves it."""

    def __init__(self) -> None:
        self.finish: defaultdict[FairQueue, int] = defaultdict(int)


account: ContextVar[Account | None] = ContextVar("account", default=None)
"""The running request's. Work without one is a request by itself."""


class FairQueue:
    """Passes work on to an executor in fair order: the request that was served the least comes first."""

    def __init__(self, submit: Callable[[Callable[[], None]], object]) -> None:
        self._submit = submit
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._now = 0

    def add(self, work: Callable[[], Any], size: int) -> Future[Any]:
        of, result = account.get() or Account(), Future[Any]()
        with self._lock:
            start = max(self._now, of.finish[self])
            of.finish[self] = start + size + _BASE
            heapq.heappush(self._waiting, (start, next(self._numbers), result, work))
        self._submit(self._run_first)
        return result

    def add_again(self) -> None:
        """Passes on what waits to an executor that has lost its work."""
        for _ in list(self._waiting):
            self._submit(self._run_first)

    def _run_first(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                self._now, _, result, work = heapq.heappop(self._waiting)
            if result.set_running_or_notify_cancel():
                break
        try:
            returned = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(returned)


def take_turns(executor: Any, apart: bool) -> None:
    """Has an executor take its work in fair order.

    executor: vLLM's, whose threads can be replaced when one of them is stuck. apart: whether long work has
    one more thread.
    """
    short = long = FairQueue(executor.submit)
    again = [(executor, executor.replace_inner, short)]
    if apart:
        more = type(executor)(1)
        long = FairQueue(more.submit)
        again.append((more, more.replace_inner, long))

    def submit(work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        call = partial(work, *given, **named)
        length = characters([call.args, call.keywords])
        return (long if length > LONG else short).add(call, length)

    def replace() -> None:
        for pool, replace_threads, queue in again:
            pool.shutdown(wait=False, cancel_futures=True)
            replace_threads()
            queue.add_again()

    executor.submit, executor.replace_inner = submit, replace


def characters(values: Any) -> int:
    """Characters of all texts in nested lists and mappings, and the number of token ids."""
    waiting, count = [values], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, str | bytes):
            count += len(value)
        elif isinstance(value, dict):
            waiting += cast("dict[str, Any]", value).values()
        elif isinstance(value, list | tuple) and value:
            value = cast("list[Any]", value)
            if isinstance(value[0], int):
                count += len(value)
            else:
                waiting += value
    return count
