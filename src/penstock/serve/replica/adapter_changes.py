"""What control says of a model's adapters, taken over by a replica that runs.

It stands between the reconciler, which hears control, and the store of adapters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.errors import Error
from penstock.layers.adapters import Store
from penstock.serve.control.state import AdapterSources

log = logging.getLogger(__name__)

_RETRY_S = 10.0


def sentence(error: Exception, what: str) -> str:
    """What control is told of `error`; one that is no `Error` is logged, as `what` has failed."""
    if isinstance(error, Error):
        return str(error)
    log.error(what, exc_info=error)
    return f"{type(error).__name__}: {error}"


class AdapterChanges:
    """One at a time, and of several only the newest. tried: the id of the last one; fault: why it failed."""

    def __init__(self, store: Store | None, report: Callable[[], None]) -> None:
        """store: None for a model without adapters. report: called after each try."""
        self._store, self._report = store, report
        self.tried, self.fault = "", ""
        self._newest: AdapterSources | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried_at = 0.0

    def received(self, sources: AdapterSources) -> None:
        """Begins to take them over, unless that is under way or has failed a moment ago."""
        is_over = self._task is not None and self._task.done()
        is_due = is_over and self.fault and time.monotonic() - self._tried_at > _RETRY_S
        if sources != self._newest or is_due:
            self.close()
            self._newest, self._task = sources, asyncio.create_task(self._take_over(sources))

    async def settled(self) -> None:
        """Returns when the last one has been tried."""
        if self._task is not None:
            await asyncio.wait({self._task})

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _take_over(self, sources: AdapterSources) -> None:
        fault = ""
        try:
            if self._store is not None:
                await self._store.change(sources.fields)
        except Exception as error:  # a downloader's or an engine's own, too
            fault = sentence(error, "The adapters cannot be changed")
        if fault and (sources.id, fault) != (self.tried, self.fault):
            log.error("The adapters stay as they were, and it is tried again: %s", fault)
        self.tried, self.fault, self._tried_at = sources.id, fault, time.monotonic()
        self._report()
