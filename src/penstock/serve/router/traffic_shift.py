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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from penstock.config.derive.serve_options import deployment_name
from penstock.serve.control.state import FOLLOW_S, WARN_AFTER, RouteStatus
from penstock.serve.fleet import membership
from penstock.serve.fleet.membership import Members
from penstock.serve.fleet.replica import Replica
from penstock.serve.fleet.table import Table

log = logging.getLogger(__name__)

_CHECK_S = 0.1
_RETRY_S = 1.0
_FIRST_S = 10.0
"""How long a gateway that starts waits for control before its own application answers."""

FollowRoutes = Callable[
    [str, Mapping[str, RouteStatus], Mapping[str, str], float], Awaitable[Mapping[str, str]]
]
"""`LLMControl.routes`: gateway id, its status by model, the routes that it knows, and seconds to wait for a
change; returns the desired routes."""

FindHandle = Callable[[str, str], Any]
"""A handle to a deployment, by its name and application."""


async def no_routes(
    gateway: str, status: Mapping[str, RouteStatus], known: Mapping[str, str], wait_s: float
) -> Mapping[str, str]:
    """`FollowRoutes` of an application without control: each model stays in the gateway's own."""
    await asyncio.sleep(wait_s)
    return {}


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
        self, table: Table, handles: Mapping[str, Any], find_handle: FindHandle, follow_routes: FollowRoutes
    ) -> None:
        """handles: to the application's own deployments, by model."""
        self._table = table
        self._find_handle = find_handle
        self._follow_routes = follow_routes
        self._id = uuid.uuid4().hex[:16]
        self._models = {model: _Model({"": handle}) for model, handle in handles.items()}
        self._desired: dict[str, str] = {}
        self._shifting: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow membership and control."""
        self._following = asyncio.create_task(self._follow())

    def close(self) -> None:
        for task in (self._following, *self._shifting.values()):
            if task is not None:
                task.cancel()

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
        """To all whose replicas may be in the table."""
        return list(self._models[model].handles.values())

    async def _begin(self) -> None:
        """Takes over shifts that happened before this gateway started."""
        try:
            async with asyncio.timeout(_FIRST_S):
                self._desired = dict(await self._follow_routes(self._id, self._status(), {}, 0.0))
        except Exception as error:  # Serve's and Ray's
            log.warning("Control does not answer (%s: %s).", type(error).__name__, error)
        for model, known in self._models.items():
            if application := self._desired.get(model):
                try:
                    await self._reach(model, application)
                    known.current = application
                except Exception as error:  # Serve's: the application has been deleted
                    log.warning("%s is not shifted: %s", model, error)
            self._watch(model, "", known.handles[""])

    async def _follow(self) -> None:
        await self._begin()
        unanswered = 0
        while True:
            try:
                self._apply(await self._follow_routes(self._id, self._status(), self._desired, FOLLOW_S))
                unanswered = 0
            except Exception as error:  # Serve's and Ray's: control is restarted, or moves
                unanswered += 1
                level = logging.INFO if unanswered % WARN_AFTER else logging.WARNING
                log.log(level, "Control does not answer (%s: %s); asking again.", type(error).__name__, error)
                await asyncio.sleep(_RETRY_S)

    def _status(self) -> dict[str, RouteStatus]:
        return {
            model: RouteStatus(known.current, sum(replica.in_flight for replica in known.previous))
            for model, known in self._models.items()
        }

    def _apply(self, desired: Mapping[str, str]) -> None:
        self._desired = dict(desired)
        for model in self._models:
            application = desired.get(model, "")
            if application != self._models[model].current and model not in self._shifting:
                self._shifting[model] = asyncio.create_task(self._shift(model, application))
                self._shifting[model].add_done_callback(partial(self._on_shifted, model))

    def _on_shifted(self, model: str, shift: asyncio.Task[None]) -> None:
        del self._shifting[model]
        if not shift.cancelled() and (error := shift.exception()) is not None:
            log.warning("%s is not shifted: %s", model, error)  # it is tried again

    async def _shift(self, model: str, application: str) -> None:
        """Ends early when another application becomes desired."""
        known = self._models[model]
        await self._reach(model, application)
        while not self._is_ready(model, application):
            if self._desired.get(model, "") != application:
                return
            self._show(model, known.current, application)
            await asyncio.sleep(_CHECK_S)
        new = known.members[application]
        known.previous = [replica for replica in self._table.members(model) if replica.id not in new]
        known.current = application
        self._show(model, application)
        log.info("%s: now answered by %s", model, application or "this application")

    async def _reach(self, model: str, application: str) -> None:
        """Follows the replicas of another application, too. Raises: what Serve raises if there is none."""
        handles = self._models[model].handles
        if application not in handles:
            handles[application] = await asyncio.to_thread(
                self._find_handle, deployment_name(model), application
            )
            self._watch(model, application, handles[application])

    def _is_ready(self, model: str, application: str) -> bool:
        members = self._models[model].members.get(application, {})
        return any(replica.id in members for replica in self._table.ready(model))

    def _watch(self, model: str, application: str, handle: Any) -> None:
        membership.follow(model, handle, partial(self._seen, model, application))

    def _seen(self, model: str, application: str, members: Members) -> None:
        known = self._models[model]
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
