"""The gateways that follow control: whose replicas answer for each model, and how many of them Serve runs.

Both follow from the desired state and from Serve's status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

from ray.serve.schema import ApplicationStatusOverview

from penstock.config.derive.serve_options import deployment_name
from penstock.serve.control.application import known
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.followers import Presence
from penstock.serve.control.operations import SHIFT, Shift
from penstock.serve.control.state import CanaryState, GatewayStatus, Outcome, Routes, RouteStatus

log = logging.getLogger(__name__)

_LATER = "The change continues; ask again."
_LOOK_S, _GAP_S = 10.0, 1.0  # between two looks at Serve's status without a change, and at least
_END_S = 0.5  # Serve kills control a second after it has asked it to end
_LEAVING = {"STOPPING", "STOPPED"}
_FAILING = {"UNHEALTHY", "DEPLOY_FAILED"}

Applications = Mapping[str, ApplicationStatusOverview]


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
    """By id, of one application."""

    def __init__(
        self,
        desired: DesiredStates,
        app: str,
        canaries: Callable[[], Mapping[str, CanaryState]] = dict[str, CanaryState],
    ) -> None:
        """app: the application's name."""
        self._canaries = canaries
        self._desired = desired
        self._app = app
        self._gateways: dict[str, _Gateway] = {}
        self.wanted: dict[str, int] = {}
        """Replicas that Serve runs or starts for a model; while some fail, at least as many as before."""

    def hear(self, status: GatewayStatus) -> None:
        """Records a gateway's report."""
        self._gateways = {one: each for one, each in self._gateways.items() if not each.gone}
        known = self._gateways.setdefault(status.gateway, _Gateway(status))
        if known.status != status:
            known.status = status
            self._desired.changed.send()

    def models(self) -> set[str]:
        """The models of all gateways."""
        return {model for one in self._gateways.values() for model in one.status.routes}

    def faults(self) -> list[str]:
        """Why gateways cannot take over the newest update."""
        living = (each.status.fault for each in self._gateways.values() if not each.gone)
        return sorted({fault for fault in living if fault})

    def updates(self, gateway: str) -> AsyncGenerator[Routes]:
        """For a gateway that was heard."""
        return self._gateways[gateway].updates(
            self._desired.changed, lambda: Routes(self._desired.routes(), self.wanted, self._canaries())
        )

    async def shift(self, model: str, application: str, timeout_s: float) -> dict[str, Outcome]:
        """Moves a model to an application, "" for the gateways' own; outcomes by gateway."""
        self._desired.change(model, "", SHIFT, Shift(application))

        def outcomes() -> dict[str, Outcome]:
            living = {one: each for one, each in self._gateways.items() if not each.gone}
            return {one: each.outcome(model, application) for one, each in living.items()}

        await self._desired.changed.wait_for(
            lambda: all("result" in outcome for outcome in outcomes().values()), timeout_s
        )
        return outcomes()

    # -- Serve's status

    async def watch(self, forget: Callable[[Iterable[str]], None]) -> None:
        """Asks Serve after each change, for ever. forget: called with all deployments that Serve has."""
        changed = self._desired.changed
        while True:
            routes = self._desired.routes()  # before the status, which may be older than later ones
            sent = changed.sent
            try:
                found = await asyncio.to_thread(known)
                if self._app in found:
                    self.see(found, routes)
                    forget({name for one in found.values() for name in one.deployments})
            except Exception:  # Serve's and Ray's: its controller is restarted
                log.info("Serve's status cannot be read now", exc_info=True)
            await changed.wait_for(lambda sent=sent: changed.sent != sent, _LOOK_S)
            await asyncio.sleep(_GAP_S)

    async def is_app_ending(self) -> bool:
        """Whether Serve says that the application is being deleted."""
        try:
            async with asyncio.timeout(_END_S):
                found = await asyncio.to_thread(known)
        except Exception:  # Serve's and Ray's: it is busy, or all ends
            return False
        return self._app not in found or found[self._app].status == "DELETING"

    def see(self, found: Applications, routes: Mapping[str, str]) -> None:
        """Takes over Serve's status. routes: those known before it was asked."""
        for model, application in routes.items():
            is_same = self._desired.get(model).application == application
            if is_same and (application not in found or found[application].status == "DELETING"):
                log.warning("%s: application %s has been deleted; this one answers.", model, application)
                self._desired.change(model, "", SHIFT, Shift(""))
        counts = {model: self._count(found, model) for model in self.models()}
        wanted = {model: count for model, count in counts.items() if count is not None}
        if wanted != self.wanted:
            self.wanted = wanted
            self._desired.changed.send()

    def _count(self, found: Applications, model: str) -> int | None:
        application = found.get(self._desired.get(model).application or self._app)
        deployment = application.deployments.get(deployment_name(model)) if application else None
        if deployment is None:
            return None
        states = deployment.replica_states.items()
        count = sum(number for state, number in states if state not in _LEAVING)
        return max(count, self.wanted.get(model, 0)) if deployment.status in _FAILING else count
