"""Models without a replica: the first request that waits for one has it started; the others wait with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Waking:
    """At most one question at a time for each model."""

    def __init__(self, wake: Callable[[str], Awaitable[None]] | None) -> None:
        """wake: returns once the model has a replica."""
        self._wake = wake
        self._asking: dict[str, asyncio.Task[None]] = {}

    def begin(self, model_id: str) -> None:
        """Asks, if nobody does."""
        if self._wake is not None and model_id not in self._asking:
            self._asking[model_id] = asyncio.create_task(self._ask(self._wake, model_id))

    async def _ask(self, wake: Callable[[str], Awaitable[None]], model_id: str) -> None:
        try:
            await wake(model_id)
        except Exception:  # whatever Serve says: the next request that waits asks again
            log.exception("%s could not be woken", model_id)
            await asyncio.sleep(_AGAIN_S)
        finally:
            self._asking.pop(model_id, None)

    def close(self) -> None:
        for asking in list(self._asking.values()):
            asking.cancel()
