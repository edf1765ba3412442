"""How often Serve's controller looks at its deployments, on a cluster that `penstock serve` starts.

Its loop runs ten times a second and asks Ray for all nodes each time: about a third of what an idle service
costs. Here it does so while something happens, and twice a second otherwise. It logs what happens: each
deployment, start, failed check, stop and change of scale, and every 30 s that a replica still starts. Serve
calls `follow` in the controller (`RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from types import ModuleType

CALLBACK = "penstock.serve.controller_pace.follow"
"""The value of the environment variable."""

INTERVAL = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
"""Serve's own, between two runs of the loop. One that the user has set stays."""

HOLD_S = 60.0
"""From the last line that the controller logged: longer than it is silent about a replica that starts."""

REST_S = 0.5
"""Between two runs while nothing happens: a dead replica is replaced that much later, at most."""

_NAME = "CONTROL_LOOP_INTERVAL_S"
_LOGGER = "ray.serve"
_LOOK_S = HOLD_S / 4

_tasks: set[asyncio.Task[None]] = set()


def follow() -> None:
    """Slows the loop of the controller in this process whenever nothing happens. Runs on its event loop.

    Does nothing where this Ray's controller has its interval elsewhere, or the user has set one.
    """
    from ray.serve._private import controller

    if INTERVAL in os.environ or not isinstance(getattr(controller, _NAME, None), float):
        return
    _tasks.add(asyncio.create_task(ControllerPace(controller).keep()))


class ControllerPace:
    """Of one controller. A filter of its logger, because Serve replaces the handlers."""

    def __init__(self, controller: ModuleType) -> None:
        self._controller = controller
        self._busy_s: float = getattr(controller, _NAME)
        self._logger = logging.getLogger(_LOGGER)
        self._logger.addFilter(self.heard)
        self._heard_at = time.monotonic()

    def heard(self, record: logging.LogRecord) -> bool:
        """Something happens: the loop runs at Serve's own interval. Every record passes."""
        self._heard_at = time.monotonic()
        setattr(self._controller, _NAME, self._busy_s)
        return True

    async def keep(self) -> None:
        """Slows the loop `HOLD_S` after the last record, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            silent_s = time.monotonic() - self._heard_at
            if silent_s > HOLD_S and self._logger.isEnabledFor(logging.INFO):
                setattr(self._controller, _NAME, max(self._busy_s, REST_S))
