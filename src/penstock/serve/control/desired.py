"""The desired state of all models of one application. Every change gets a version and wakes who waits."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from penstock.serve.control import operations
from penstock.serve.control.state import FOLLOW_S, DesiredState
from penstock.serve.control.store import StateStore

log = logging.getLogger(__name__)


class Signal:
    """Wakes all tasks that wait for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.sent = 0
        self.closed = False

    def close(self) -> None:
        """For the end of control: links end, too."""
        self.closed = True
        self.send()

    def send(self) -> None:
        self.sent += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, condition: Callable[[], Any], limit_s: float) -> None:
        """Returns once `condition` is true, or after `limit_s`. Looks at each signal, and each `FOLLOW_S`."""
        deadline = time.monotonic() + limit_s
        while not condition() and (now := time.monotonic()) < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(deadline - now, FOLLOW_S)):
                    await self._event.wait()


class DesiredStates:
    """By model, and by replica where one differs from its model."""

    def __init__(self, store: StateStore, changed: Signal) -> None:
        self._store = store
        self._changed = changed
        self._version = store.version()

    def get(self, model: str, replica: str = "") -> DesiredState:
        return self._store.get(model, replica)

    def change(self, model: str, replica: str, operation: str, arguments: Any) -> DesiredState:
        """Applies an operation. replica: "" for the whole model. arguments: as returned by `parse`."""
        return self.set(model, operations.apply(self.get(model, replica), operation, arguments, replica))

    def set(self, model: str, wanted: DesiredState) -> DesiredState:
        """Returns the same with its version."""
        self._version += 1
        desired = msgspec.structs.replace(wanted, version=self._version)
        self._store.set(model, desired)
        self._changed.send()
        return desired

    def recover(self, model: str, replica: str, reported: DesiredState) -> None:
        """Takes over what a replica knows and this store lacks: control may have moved to another node."""
        if reported.version > self.get(model, replica).version:
            log.warning("%s: taking over version %d of the desired state", model, reported.version)
            self._version = max(self._version, reported.version)
            self._store.set(model, reported)

    def forget(self, model: str, replica: str) -> None:
        """For a replica that is gone."""
        self._store.forget(model, replica)

    def routes(self) -> dict[str, str]:
        """The application that answers for a model, by model, where it is not the gateway's own."""
        routes = {model: self.get(model).application for model in self._store.models()}
        return {model: application for model, application in routes.items() if application}
