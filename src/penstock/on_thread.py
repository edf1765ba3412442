"""Calls that block, which a cancelled caller must not leave behind.

A thread goes on when the caller that waits for it is cancelled: what it then opens would never be closed, and
what it writes would come after the next owner's. Used where jobs take their locks, open their journals and
write files, and for the records of files and batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

_Opened = TypeVar("_Opened")
_T = TypeVar("_T")


async def completed(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which always runs to its end; a caller that is cancelled leaves only then.

    Raises: what `work` raises, unless the caller was cancelled.
    """
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


@asynccontextmanager
async def opened(open: Callable[[], _Opened], close: Callable[[_Opened], None]) -> AsyncGenerator[_Opened]:
    """What `open` returns, on a thread; `close` gets it at the end, also where the caller was cancelled
    before it was there.

    Raises: as `open`, and as `close`.
    """
    opening = asyncio.create_task(asyncio.to_thread(open))
    try:
        yield await asyncio.shield(opening)
    finally:
        await completed(_close(opening, close))


async def _close(opening: asyncio.Task[_Opened], close: Callable[[_Opened], None]) -> None:
    await asyncio.wait({opening})
    if opening.exception() is None:
        await asyncio.to_thread(close, opening.result())
