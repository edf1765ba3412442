"""What Ray Serve passes on to a process that runs, as the `user_config` of its deployment.

Between Serve's hook and what takes it over, a gateway or files and batches, which it does not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.errors import Error

log = logging.getLogger(__name__)

_LIMIT_S, _AGAIN_S = 30.0, 1.0  # for one try, and before the next one


class Updates:
    """One at a time, and of several only the newest: again until it could be taken over."""

    def __init__(self, take_over: Callable[[Any], Awaitable[None]], report: Callable[[str], None]) -> None:
        """take_over: changes everything, or nothing when it raises or is cancelled. report: is called with
        the reason when it did not, and with "" when it did.
        """
        self._take_over, self._report = take_over, report
        self._newest: Any = None
        self._changing = asyncio.Lock()
        self._trying: asyncio.Task[None] | None = None

    async def receive(self, update: Any) -> None:
        """Returns when it is taken over, or after a first try, and raises nothing.

        For an error Serve would kill the process with its streams, and no other comes before this returns.
        """
        self._newest = update
        if self._trying is not None:
            self._trying.cancel()
        if not await self._try(update):
            self._trying = asyncio.create_task(self._keep_trying(update))

    def close(self) -> None:
        """Tries nothing again."""
        if self._trying is not None:
            self._trying.cancel()

    async def _keep_trying(self, update: Any) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            if await self._try(update, again=True):
                log.info("The update is taken over now.")
                return

    async def _try(self, update: Any, again: bool = False) -> bool:
        """Whether nothing is left to do. Logs the first failure."""
        try:
            async with asyncio.timeout(_LIMIT_S), self._changing:
                if update is self._newest:
                    await self._take_over(update)
        except Exception as error:  # also of foreign code: a routing policy's, Serve's
            if not again:
                what = "An update cannot be taken over, and is tried again; this process stays as it was: %s"
                trace = None if isinstance(error, Error) else error
                log.error(what, str(error) or type(error).__name__, exc_info=trace)
            self._report(str(error) or type(error).__name__)
            return False
        self._report("")
        return True
