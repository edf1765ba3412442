"""What is opened and closed by calls that block, for as long as a block of async code needs it.

A thread goes on when the caller that waits for it is cancelled: what it then opens would never be closed.
Used where jobs take their locks and open their journals.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

_Opened = TypeVar("_Opened")


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
        await asyncio.shield(asyncio.create_task(_close(opening, close)))


async def _close(opening: asyncio.Task[_Opened], close: Callable[[_Opened], None]) -> None:
    await asyncio.wait({opening})
    if opening.exception() is None:
        await asyncio.to_thread(close, opening.result())
