"""Blue/green: which application's replicas answer for a model, the gateway's own or another one's.

A gateway follows control, which keeps the desired application of each model. A shift takes three steps: the
table holds replicas of both applications until one of the new ones is ready; then only the new ones are
picked; it is complete when the old ones have answered their open requests. It stands between membership and
the table.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.config.derive.serve_options import deployment_name
from penstock.serve.control.link import ControlLink
from penstock.serve.control.state import GatewayStatus, Routes, RouteStatus
from penstock.serve.fleet import membership
from penstock.serve.fleet.membership import Members
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table
from penstock.serve.routing.split import Splits

log = logging.getLogger(__name__)

_CHECK_S, _REACH_S = 0.1, 30.0
_FIRST_S = 30.0
"""How long a gateway that starts waits for control before its own application answers."""

FindHandle = Callable[[str, str], Any]
"""A handle to a deployment, by its name and application."""


@dataclass(slots=True)
class _Model:
    """handles, members: by application, "" for the gateway's own. current: the one that answers."""

    handles: dict[str, Any]
    members: dict[str, Members] = field(default_factory=dict[str, Members])
    current: str = ""
    previous: list[Replica] = field(default_factory=list[Replica])


class TrafficShifts:
    """Of one gateway. Runs on the table's event loop."""

    def __init__(
        self, table: Table, handles: Mapping[str, Any], find_handle: FindHandle, control: ControlLink | None
    ) -> None:
        """handles: to the application's own deployments, by model. control: None where it has none: each
        model stays in the gateway's own application."""
        self._table = table
        self._find_handle = find_handle
        self._control = control
        self._id, self._fault = uuid.uuid4().hex[:16], ""
        self._models = {model: _Model({"": handle}) for model, handle in handles.items()}
        self._desired: dict[str, str] = {}
        self._shifting: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, str] = {}  # application, by model, of shifts that a warning was logged for
        self._splits = Splits()
        self._first, self._begun = asyncio.Event(), False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, splits: Splits | None = None) -> None:
        """Begins to follow membership and control. splits: what follows control, too."""
        self._splits = splits or self._splits
        if self._control is not None:
            following = self._control.follow(self._status, Routes, self._received)
            self._tasks.append(asyncio.create_task(following))
        else:
            self._first.set()
        self._tasks.append(asyncio.create_task(self._begin()))

    def close(self) -> None:
        for task in (*self._tasks, *self._shifting.values()):
            task.cancel()

    def follow(self, handles: Mapping[str, Any]) -> None:
        """From now on there are these models. A handle that is another one than before is followed anew."""
        for model in [
            known for known, one in self._models.items() if one.handles[""] is not handles.get(known)
        ]:
            if (shift := self._shifting.get(model)) is not None:
                shift.cancel()
            for handle in self._models.pop(model).handles.values():
                membership.unfollow(model, handle)
            if model not in handles:
                self._table.set_members(model, {})
        for model in handles.keys() - self._models.keys():
            self._models[model] = _Model({"": handles[model]})
            if self._first.is_set():
                self._tasks.append(asyncio.create_task(self._take_over(model)))
        if self._control is not None:
            self._control.report()

    def report(self, fault: str) -> None:
        """Has control know why an update is not taken over; "" when it is."""
        before, self._fault = self._fault, fault
        if self._control is not None and fault != before:
            self._control.report()

    def all_known(self) -> bool:
        """Whether Serve has named the replicas of every model, and each of them has reported."""
        return all(known.members for known in self._models.values()) and all(
            replica.reports for replica in self._table
        )

    def handle(self, model: str) -> Any:
        """To the deployment that answers now."""
        known = self._models[model]
        return known.handles[known.current]

    def handles(self, model: str) -> list[Any]:
        """To all whose replicas may be in the table; none of a model that has been removed."""
        return list(self._models[model].handles.values()) if model in self._models else []

    async def _begin(self) -> None:
        """Takes over shifts that happened before this gateway started."""
        try:
            async with asyncio.timeout(_FIRST_S):
                await self._first.wait()
        except TimeoutError:
            log.warning("Control has told no routes within %g s; this application answers.", _FIRST_S)
            self._first.set()
        await asyncio.gather(*map(self._take_over, self._models))
        self._begun = True
        self._apply()

    async def _take_over(self, model: str) -> None:
        if (known := self._models.get(model)) is None:
            return
        if application := self._desired.get(model):
            try:
                await self._reach(model, application)
                known.current = application
            except Exception as error:  # Serve's: the application has been deleted
                self._warn(model, application, error)
        if self._models.get(model) is known:
            self._watch(model, "", known.handles[""])

    def _status(self) -> GatewayStatus:
        routes = {
            model: RouteStatus(known.current, sum(replica.in_flight for replica in known.previous))
            for model, known in self._models.items()
        }
        is_shifting = bool(self._shifting) or any(route.open for route in routes.values())
        canaries = self._splits.reports()
        return GatewayStatus(self._id, routes, is_shifting, self._fault, canaries)

    def _received(self, routes: Routes) -> None:
        self._desired = dict(routes.applications)
        self._table.wanted = dict(routes.wanted)
        self._splits.hear(routes.canaries)
        self._first.set()
        if self._begun:
            self._apply()

    def _apply(self) -> None:
        for model, known in self._models.items():
            application = self._desired.get(model, "")
            if application != known.current and model not in self._shifting:
                self._shifting[model] = asyncio.create_task(self._shift(model, application))
                self._shifting[model].add_done_callback(partial(self._on_shifted, model, application))

    def _on_shifted(self, model: str, application: str, shift: asyncio.Task[None]) -> None:
        del self._shifting[model]
        if self._control is not None:
            self._control.report()
        if not shift.cancelled() and (error := shift.exception()) is not None:
            self._warn(model, application, error)  # it is tried again with the next routes
        elif not shift.cancelled() and self._desired.get(model, "") != application:
            self._apply()

    def _warn(self, model: str, application: str, error: BaseException) -> None:
        """Logs it once for each application."""
        if self._failed.get(model) != application:
            log.warning("%s is not shifted to %s: %s", model, application or "this application", error)
        self._failed[model] = application

    async def _shift(self, model: str, application: str) -> None:
        """Ends early when another application becomes desired."""
        known = self._models[model]
        await self._reach(model, application)
        while not self._is_ready(model, application):
            if self._desired.get(model, "") != application:
                self._show(model, known.current)
                self._leave(model, known)
                return
            self._show(model, known.current, application)
            await asyncio.sleep(_CHECK_S)
        new = known.members[application]
        known.previous = [replica for replica in self._table.members(model) if replica.id not in new]
        known.current = application
        self._failed.pop(model, None)
        self._show(model, application)
        self._leave(model, known)
        log.info("%s: now answered by %s", model, application or "this application")

    def _leave(self, model: str, known: _Model) -> None:
        """Follows no application any more but the gateway's own and the one that answers."""
        for other in known.handles.keys() - {"", known.current}:
            membership.unfollow(model, known.handles.pop(other))
            known.members.pop(other, None)

    async def _reach(self, model: str, application: str) -> None:
        """Follows the replicas of another application, too.

        Raises: what Serve raises if there is none; TimeoutError.
        """
        known = self._models[model]
        if application not in known.handles:
            async with asyncio.timeout(_REACH_S):  # Serve's controller may be away
                handle = await asyncio.to_thread(self._find_handle, deployment_name(model), application)
            if self._models.get(model) is known:  # it was not removed meanwhile
                known.handles[application] = handle
                self._watch(model, application, handle)

    def _is_ready(self, model: str, application: str) -> bool:
        members = self._models[model].members.get(application, {})
        return any(replica.id in members for replica in self._table.ready(model))

    def _watch(self, model: str, application: str, handle: Any) -> None:
        membership.follow(model, handle, partial(self._seen, model, application))

    def _seen(self, model: str, application: str, members: Members) -> None:
        if (known := self._models.get(model)) is None:
            return
        known.members[application] = members
        if model in self._shifting:
            self._show(model, known.current, self._desired.get(model, ""))
        else:
            self._show(model, known.current)

    def _show(self, model: str, *applications: str) -> None:
        found: dict[str, Any] = {}
        for application in applications:
            found |= self._models[model].members.get(application, {})
        self._table.set_members(model, found)
