"""Which application's replicas answer for a model: the gateway's own, or those of another one meanwhile.

A gateway follows control, which keeps where each model is to be answered. A move takes three steps: replicas
of both applications are there, until one of the other's is ready; then only those are picked; and the move is
over when what the replicas before were answering has ended. It stands between membership and the table.
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

_LOOK_S = 0.1
_AGAIN_S = 1.0
_FIRST_S = 10.0
"""A gateway that starts waits so long for control before it lets its own application answer."""

Ask = Callable[[str, Mapping[str, RouteStatus], Mapping[str, str], float], Awaitable[Mapping[str, str]]]
"""Control's `route`: who asks, where its models are, where they shall be as far as it knows, and how long to
wait for other news, in seconds; gives where they shall be."""

Find = Callable[[str, str], Any]
"""A handle to a deployment, by its name and application."""


@dataclass(slots=True)
class _Model:
    """handles, members: by application, "" for the gateway's own. current: where requests go."""

    handles: dict[str, Any]
    members: dict[str, Members] = field(default_factory=dict[str, Members])
    current: str = ""
    before: list[Replica] = field(default_factory=list[Replica])


class TrafficShifts:
    """Of one gateway. Lives on the table's event loop."""

    def __init__(self, table: Table, handles: Mapping[str, Any], find: Find, ask: Ask) -> None:
        """handles: to the application's own deployments, by model."""
        self._table = table
        self._find = find
        self._ask = ask
        self._id = uuid.uuid4().hex[:16]
        self._models = {model: _Model({"": handle}) for model, handle in handles.items()}
        self._wanted: dict[str, str] = {}
        self._moves: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to follow membership and control."""
        self._following = asyncio.create_task(self._follow())

    def close(self) -> None:
        for task in (self._following, *self._moves.values()):
            if task is not None:
                task.cancel()

    def handle(self, model: str) -> Any:
        """To the deployment that answers now."""
        known = self._models[model]
        return known.handles[known.current]

    def handles(self, model: str) -> list[Any]:
        """To all whose replicas may be in the table."""
        return list(self._models[model].handles.values())

    async def _begin(self) -> None:
        """Models that were moved before this gateway started are not answered by its own application."""
        try:
            async with asyncio.timeout(_FIRST_S):
                self._wanted = dict(await self._ask(self._id, self._told(), {}, 0.0))
        except Exception as error:  # Serve's and Ray's
            log.warning("Control does not answer (%s: %s).", type(error).__name__, error)
        for model, known in self._models.items():
            if application := self._wanted.get(model):
                try:
                    await self._reach(model, application)
                    known.current = application
                except Exception as error:  # Serve's: the application has been deleted
                    log.warning("%s stays where it is: %s", model, error)
            self._watch(model, "", known.handles[""])

    async def _follow(self) -> None:
        await self._begin()
        unanswered = 0
        while True:
            try:
                self._obey(await self._ask(self._id, self._told(), self._wanted, FOLLOW_S))
                unanswered = 0
            except Exception as error:  # Serve's and Ray's: control is restarted, or moves
                unanswered += 1
                level = logging.INFO if unanswered % WARN_AFTER else logging.WARNING
                log.log(level, "Control does not answer (%s: %s); asking again.", type(error).__name__, error)
                await asyncio.sleep(_AGAIN_S)

    def _told(self) -> dict[str, RouteStatus]:
        return {
            model: RouteStatus(known.current, sum(replica.in_flight for replica in known.before))
            for model, known in self._models.items()
        }

    def _obey(self, wanted: Mapping[str, str]) -> None:
        self._wanted = dict(wanted)
        for model in self._models:
            application = wanted.get(model, "")
            if application != self._models[model].current and model not in self._moves:
                self._moves[model] = asyncio.create_task(self._move(model, application))
                self._moves[model].add_done_callback(partial(self._moved, model))

    def _moved(self, model: str, move: asyncio.Task[None]) -> None:
        del self._moves[model]
        if not move.cancelled() and (error := move.exception()) is not None:
            log.warning("%s stays where it is: %s", model, error)  # and is tried again

    async def _move(self, model: str, application: str) -> None:
        """Ends without a move when another one is wanted meanwhile."""
        known = self._models[model]
        await self._reach(model, application)
        while not self._is_ready(model, application):
            if self._wanted.get(model, "") != application:
                return
            self._show(model, known.current, application)
            await asyncio.sleep(_LOOK_S)
        new = known.members[application]
        known.before = [replica for replica in self._table.members(model) if replica.id not in new]
        known.current = application
        self._show(model, application)
        log.info("%s: answered by %s now", model, application or "this application")

    async def _reach(self, model: str, application: str) -> None:
        """Follows the replicas of another application, too. Raises: what Serve raises where there is none."""
        handles = self._models[model].handles
        if application not in handles:
            handles[application] = await asyncio.to_thread(self._find, deployment_name(model), application)
            self._watch(model, application, handles[application])

    def _is_ready(self, model: str, application: str) -> bool:
        members = self._models[model].members.get(application, {})
        return any(replica.id in members for replica in self._table.ready(model))

    def _watch(self, model: str, application: str, handle: Any) -> None:
        membership.follow(model, handle, partial(self._seen, model, application))

    def _seen(self, model: str, application: str, members: Members) -> None:
        known = self._models[model]
        known.members[application] = members
        if model in self._moves:
            self._show(model, known.current, self._wanted.get(model, ""))
        else:
            self._show(model, known.current)

    def _show(self, model: str, *applications: str) -> None:
        found: dict[str, Any] = {}
        for application in applications:
            found |= self._models[model].members.get(application, {})
        self._table.set_members(model, found)
