"""Threads for the user's plain functions, so that ours never wait for them."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """`await threads.run(function, ...)`. None is started before it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, called in the context of the running task."""
        if self._pool is None:
            most = min(32, (os.cpu_count() or 1) + 4)  # Python's own default
            self._pool = ThreadPoolExecutor(most, self._name)
        inside = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: inside.run(_called, function, arguments))


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Raises: RuntimeError for an exception that would end the event loop, or block its caller for ever."""
    try:
        return function(*arguments)
    except (StopIteration, SystemExit) as error:
        raise RuntimeError(f"It raised {error!r}.") from error
