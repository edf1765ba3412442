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
    _tasks.add(asyncio.create_task(keep_pace(controller)))


async def keep_pace(controller: ModuleType) -> None:
    """Slows the loop `HOLD_S` after the controller's last record, for ever."""
    busy_s: float = getattr(controller, _NAME)
    logger, heard_at = logging.getLogger(_LOGGER), time.monotonic()

    def heard(record: logging.LogRecord) -> bool:
        """Something happens: the loop runs at Serve's own interval. Every record passes."""
        nonlocal heard_at
        heard_at = time.monotonic()
        setattr(controller, _NAME, busy_s)
        return True

    logger.addFilter(heard)  # a filter, because Serve replaces the handlers
    while True:
        await asyncio.sleep(_LOOK_S)
        if time.monotonic() - heard_at > HOLD_S and logger.isEnabledFor(logging.INFO):
            setattr(controller, _NAME, max(busy_s, REST_S))
