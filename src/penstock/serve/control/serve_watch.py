"""What Serve's status says of the models: how many replicas there should be, and what has been deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from ray import serve
from ray.serve.schema import ApplicationStatusOverview

from penstock.config.derive.serve_options import deployment_name
from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.operations import SHIFT, Shift

log = logging.getLogger(__name__)

_LOOK_S, _GAP_S = 10.0, 1.0  # between two looks without a change, and at least
_END_S = 0.5  # Serve kills control a second after it has asked it to end
_LEAVING = {"STOPPING", "STOPPED"}
_FAILING = {"UNHEALTHY", "DEPLOY_FAILED"}

Applications = Mapping[str, ApplicationStatusOverview]


class ServeWatch:
    """Asks Serve after each change among control's followers."""

    def __init__(self, app: str, desired: DesiredStates, changed: Signal) -> None:
        """app: the application's name."""
        self._app = app
        self._desired = desired
        self._changed = changed
        self.wanted: dict[str, int] = {}
        """Replicas that Serve runs or starts for a model; while some fail, at least as many as before."""

    async def watch(
        self, models: Callable[[], Iterable[str]], forget: Callable[[Iterable[str]], None]
    ) -> None:
        """For ever. models: those of gateways. forget: called with all models that Serve has."""
        while True:
            routes = self._desired.routes()  # before the status, which may be older than later ones
            sent = self._changed.sent
            try:
                found = (await asyncio.to_thread(serve.status)).applications
                if self._app in found:
                    self.see(found, models(), routes)
                    forget({name for one in found.values() for name in one.deployments})
            except Exception:  # Serve's and Ray's: its controller is restarted
                log.info("Serve's status cannot be read now", exc_info=True)
            await self._changed.wait_for(lambda sent=sent: self._changed.sent != sent, _LOOK_S)
            await asyncio.sleep(_GAP_S)

    async def is_ending(self) -> bool:
        """Whether Serve says that the application is being deleted."""
        try:
            async with asyncio.timeout(_END_S):
                found = (await asyncio.to_thread(serve.status)).applications
        except Exception:  # Serve's and Ray's: it is busy, or all ends
            return False
        return self._app not in found or found[self._app].status == "DELETING"

    def see(self, found: Applications, models: Iterable[str], routes: Mapping[str, str]) -> None:
        """Takes over Serve's status. routes: those known before it was asked."""
        for model, application in routes.items():
            is_same = self._desired.get(model).application == application
            if is_same and (application not in found or found[application].status == "DELETING"):
                log.warning("%s: application %s has been deleted; this one answers.", model, application)
                self._desired.change(model, "", SHIFT, Shift(""))
        wanted = {model: self._count(found, model) for model in models}
        wanted = {model: count for model, count in wanted.items() if count is not None}
        if wanted != self.wanted:
            self.wanted = wanted
            self._changed.send()

    def _count(self, found: Applications, model: str) -> int | None:
        application = found.get(self._desired.get(model).application or self._app)
        deployment = application.deployments.get(deployment_name(model)) if application else None
        if deployment is None:
            return None
        states = deployment.replica_states.items()
        count = sum(number for state, number in states if state not in _LEAVING)
        return max(count, self.wanted.get(model, 0)) if deployment.status in _FAILING else count
