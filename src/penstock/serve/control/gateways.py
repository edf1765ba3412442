"""The gateways that follow control: which application's replicas answer for each model."""

from __future__ import annotations

import time
from collections.abc import Mapping

from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.followers import GONE_S
from penstock.serve.control.operations import SHIFT, Shift
from penstock.serve.control.state import FOLLOW_S, Outcome, RouteStatus

_SHIFTING_S = 0.2  # between two reports of a gateway that moves a model
_LATER = "The change continues; ask again."


class _Gateway:
    def __init__(self) -> None:
        self.status: Mapping[str, RouteStatus] = {}
        self.heard_at = 0.0

    def hear(self, status: Mapping[str, RouteStatus]) -> bool:
        """Whether it has changed."""
        known, self.status, self.heard_at = self.status, status, time.monotonic()
        return known != status

    def outcome(self, model: str, application: str) -> Outcome:
        status = self.status.get(model, RouteStatus(""))
        if status.application != application:
            return {"error": f"No replica of '{application or 'this application'}' is ready. {_LATER}"}
        if status.open:
            return {"error": f"It has moved; {status.open} requests before that are still open. {_LATER}"}
        return {"result": "shifted"}


class Gateways:
    """By id."""

    def __init__(self, desired: DesiredStates, changed: Signal) -> None:
        self._desired = desired
        self._changed = changed
        self._gateways: dict[str, _Gateway] = {}

    async def routes(
        self, gateway: str, status: Mapping[str, RouteStatus], known: Mapping[str, str], wait_s: float
    ) -> Mapping[str, str]:
        """The application that answers for a model, by model, where it is not the gateway's own.

        Returns when it differs from what the gateway knows, at once while it moves, else after `wait_s`.
        """
        self._forget_gone()
        if self._gateways.setdefault(gateway, _Gateway()).hear(status):
            self._changed.send()
        deadline = time.monotonic() + wait_s
        if any(one.open or one.application != known.get(model, "") for model, one in status.items()):
            deadline = min(deadline, time.monotonic() + _SHIFTING_S)
        while (routes := self._desired.routes()) == known and await self._changed.wait_until(deadline):
            pass
        return routes

    async def shift(self, model: str, application: str, timeout_s: float) -> dict[str, Outcome]:
        """Moves a model to an application, "" for the gateways' own; outcomes by gateway."""
        self._desired.change(model, "", SHIFT, Shift(application))
        deadline = time.monotonic() + timeout_s
        while True:
            self._forget_gone()
            found = {one: each.outcome(model, application) for one, each in self._gateways.items()}
            if all("result" in outcome for outcome in found.values()) or time.monotonic() >= deadline:
                return found
            await self._changed.wait_until(min(deadline, time.monotonic() + FOLLOW_S))

    def _forget_gone(self) -> None:
        oldest = time.monotonic() - GONE_S
        self._gateways = {one: each for one, each in self._gateways.items() if each.heard_at >= oldest}
