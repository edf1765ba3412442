"""Models that have no replica, or none awake: the first request that waits for one has it brought about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

_AGAIN_S = 1.0


class Waking:
    """One question at a time for each model, for as long as requests wait for it."""

    def __init__(
        self, wake: Callable[[str], Awaitable[None]] | None, is_wanted: Callable[[str], bool]
    ) -> None:
        """wake: returns once the model has been woken. is_wanted: whether requests wait in vain."""
        self._wake = wake
        self._is_wanted = is_wanted
        self._asking: dict[str, asyncio.Task[None]] = {}

    def begin(self, model_id: str) -> None:
        """Asks, if nobody does."""
        if self._wake is not None and model_id not in self._asking:
            self._asking[model_id] = asyncio.create_task(self._ask(self._wake, model_id))

    async def _ask(self, wake: Callable[[str], Awaitable[None]], model_id: str) -> None:
        try:
            while self._is_wanted(model_id):
                try:
                    await wake(model_id)
                except Exception as error:  # Serve's, Ray's, control's
                    log.warning("%s could not be woken: %s", model_id, error)
                await asyncio.sleep(_AGAIN_S)
        finally:
            del self._asking[model_id]

    def close(self) -> None:
        for asking in list(self._asking.values()):
            asking.cancel()
