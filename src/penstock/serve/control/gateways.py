"""The gateways that follow control: which application's replicas answer for each model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.followers import Presence
from penstock.serve.control.operations import SHIFT, Shift
from penstock.serve.control.state import GatewayStatus, Outcome, Routes, RouteStatus

_LATER = "The change continues; ask again."


class _Gateway(Presence):
    def __init__(self, status: GatewayStatus) -> None:
        super().__init__()
        self.status = status

    def outcome(self, model: str, application: str) -> Outcome:
        status = self.status.routes.get(model, RouteStatus(""))
        if status.application != application:
            return {"error": f"No replica of '{application or 'this application'}' is ready. {_LATER}"}
        if status.open:
            return {"error": f"It has moved; {status.open} requests before that are still open. {_LATER}"}
        return {"result": "shifted"}


class Gateways:
    """By id."""

    def __init__(
        self, desired: DesiredStates, changed: Signal, wanted: Callable[[], dict[str, int]] = dict
    ) -> None:
        """wanted: as in `Routes`."""
        self._desired = desired
        self._changed = changed
        self._wanted = wanted
        self._gateways: dict[str, _Gateway] = {}

    def hear(self, status: GatewayStatus) -> None:
        """Records a gateway's report."""
        self._gateways = {one: each for one, each in self._gateways.items() if not each.gone}
        known = self._gateways.setdefault(status.gateway, _Gateway(status))
        if known.status != status:
            known.status = status
            self._changed.send()

    def models(self) -> set[str]:
        """The models of all gateways."""
        return {model for one in self._gateways.values() for model in one.status.routes}

    def updates(self, gateway: str) -> AsyncGenerator[Routes]:
        """For a gateway that was heard."""
        return self._gateways[gateway].updates(
            self._changed, lambda: Routes(self._desired.routes(), self._wanted())
        )

    async def shift(self, model: str, application: str, timeout_s: float) -> dict[str, Outcome]:
        """Moves a model to an application, "" for the gateways' own; outcomes by gateway."""
        self._desired.change(model, "", SHIFT, Shift(application))

        def outcomes() -> dict[str, Outcome]:
            living = {one: each for one, each in self._gateways.items() if not each.gone}
            return {one: each.outcome(model, application) for one, each in living.items()}

        await self._changed.wait_for(
            lambda: all("result" in outcome for outcome in outcomes().values()), timeout_s
        )
        return outcomes()
