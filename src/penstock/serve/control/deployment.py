"""Control: what each model's replicas shall be, kept and told to them; and what is asked of them once.

A deployment of one replica. Replicas follow it: each has a question open here that is answered when something
is desired anew, so that a replica that starts, restarts or missed a word comes to the same state as the
others. Nothing of a request passes through here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray import serve

from penstock.config.derive.serve_options import deployment_name
from penstock.config.schema.settings import Settings
from penstock.errors import BadRequest, ModelNotFound
from penstock.serve.control import store
from penstock.serve.control.state import (
    CHANGES,
    FOLLOW_S,
    SHIFT,
    Desired,
    Moved,
    News,
    Order,
    Outcome,
    Shift,
    Told,
    changed,
    checked,
    due,
)
from penstock.serve.control.store import Ledger
from penstock.serve.control.time_sharing import Turns

log = logging.getLogger(__name__)

NAME = "LLMControl"

_GONE_S = 3 * FOLLOW_S
_FIRST_S = 5.0  # for replicas to speak up after control was restarted
_LIMIT_S = 300.0
_MOVING_S = 0.2  # until a gateway that moves a model tells how far it is
_LATER = "It goes on; ask again."
_NEXT = "One that takes its place comes up in the state that is desired."


class LLMControl:
    """Of one application. Ask it by handle: `serve.get_deployment_handle("LLMControl", app_name)`."""

    def __init__(self) -> None:
        """Without arguments: Serve would start it anew whenever they change."""
        context, app = ray.get_runtime_context(), serve.get_replica_context().app_name
        file = store.file(context.gcs_address, app, context.get_session_name())
        self._ledger = Ledger(Settings.read().cache_folder() / "control" / file)
        self._version = self._ledger.version()
        self._app = app
        self._followers: dict[str, dict[str, _Follower]] = {}
        self._gateways: dict[str, _Gateway] = {}
        self._numbers = itertools.count(1)
        self._outcomes: dict[int, dict[str, Outcome]] = {}
        self._turns = Turns(self)
        self._news = _Signal()

    async def follow(self, model: str, told: Told, wait_s: float = FOLLOW_S) -> News:
        """News for the replica that asks: at once when there are some, else after `wait_s`."""
        followers = self._followers.setdefault(model, {})
        follower = followers.setdefault(told.replica, _Follower())
        if follower.heard(told):
            self._news.give()
        self._learn(model, told)
        self._turns.enter(model, told)
        deadline = time.monotonic() + wait_s
        while True:
            desired = self._due(model, told)
            if desired.version != told.desired.version or follower.orders:
                break
            if not await self._news.before(deadline):
                break
        orders, follower.orders = tuple(follower.orders), []
        follower.given = desired.version
        return News(desired, orders)

    def _due(self, model: str, told: Told) -> Desired:
        """Weights go from one replica to the next, of which one may die on the way."""
        others = (self._followers[model][one] for one in self.living(model) if one != told.replica)
        others_change = any(other.changes for other in others)
        return due(self._ledger.get(model, told.replica), told, others_change)

    async def done(self, order: int, replica: str, outcome: Outcome) -> None:
        """Told by a replica that has obeyed an order."""
        if order in self._outcomes:
            self._outcomes[order][replica] = outcome
            self._news.give()

    def _learn(self, model: str, told: Told) -> None:
        """From a replica: control may have been started on another node than before."""
        if told.desired.version > self._ledger.get(model, told.replica).version:
            log.warning("%s: taking over version %d of what is desired", model, told.desired.version)
            self._version = max(self._version, told.desired.version)
            self._ledger.set(model, told.desired)

    async def perform(
        self,
        operation: str,
        model: str | None = None,
        replica: str | None = None,
        timeout_s: float = _LIMIT_S,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Does one of `OPERATIONS` to all replicas of a model, or to one; gives what became of it.

        `shift` is done to gateways, which take the places of replicas in what is given.
        A state is kept: replicas that come later are in it, too, and those that did not reach it within
        `timeout_s` go on trying. Gives {"model", "ok", "replicas": {id: {"result"} or {"error"}}}.
        Raises: BadRequest, ModelNotFound.
        """
        asked = checked(operation, arguments)
        await self._first_follower()
        name = self._model(model)
        ids = self._asked(name, replica)
        if operation == SHIFT:
            results = await self._shift(name, asked.application, timeout_s)
        elif operation in CHANGES:
            results = await self._change(name, replica, operation, asked, ids, timeout_s)
        else:
            results = await self._ask(name, operation, arguments, ids, timeout_s)
        return {"model": name, "ok": not any("error" in one for one in results.values()), "replicas": results}

    async def route(
        self, gateway: str, told: Mapping[str, Moved], known: Mapping[str, str], wait_s: float = FOLLOW_S
    ) -> Mapping[str, str]:
        """Which application shall answer for a model, where it is not the gateway's own; for gateways.

        Given when it differs from what the gateway knows, at once while it moves, else after `wait_s`.
        """
        self._forget_gateways()
        speaker = self._gateways.setdefault(gateway, _Gateway())
        if speaker.heard(told):
            self._news.give()
        deadline = time.monotonic() + wait_s
        if any(moved.open or moved.application != known.get(model, "") for model, moved in told.items()):
            deadline = min(deadline, time.monotonic() + _MOVING_S)
        while (routes := self._routes()) == known and await self._news.before(deadline):
            pass
        return routes

    def _routes(self) -> dict[str, str]:
        """By model."""
        routes = {model: self._ledger.get(model).application for model in self._ledger.models()}
        return {model: application for model, application in routes.items() if application}

    async def _shift(self, model: str, application: str, limit_s: float) -> dict[str, Outcome]:
        """By gateway. The application's own name, or "", is the way back."""
        application = "" if application == self._app else application
        if application:
            await asyncio.to_thread(_find_model, model, application)
        self.declare(model, "", SHIFT, Shift(application))
        deadline = time.monotonic() + limit_s
        while True:
            self._forget_gateways()
            found = {one: each.outcome(model, application) for one, each in self._gateways.items()}
            if all("result" in outcome for outcome in found.values()) or time.monotonic() >= deadline:
                return found
            await self._news.before(min(deadline, time.monotonic() + FOLLOW_S))

    def _forget_gateways(self) -> None:
        """Those that have ended."""
        oldest = time.monotonic() - _GONE_S
        self._gateways = {one: each for one, each in self._gateways.items() if each.at >= oldest}

    async def want(self, model: str, idle_s: Mapping[str, float]) -> None:
        """A request waits for a model that takes turns: returns when it is its turn, and it is awake.

        idle_s: seconds since the gateway that asks had a request for each model.
        """
        self._turns.used(idle_s)
        await self._turns.want(model)

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """Desired and actual state of every replica, by model."""
        await self._first_follower()
        names = [self._model(model)] if model is not None else list(self._followers)
        return {name: self._state(name) for name in names}

    def _state(self, model: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for replica_id, told in self.living(model).items():
            desired = self._ledger.get(model, replica_id)
            shown[replica_id] = {
                **({"role": told.role} if told.role else {}),
                "actual": told.actual,
                "weights": told.weights,
                "desired": _shown(desired),
                "reached": told.done >= desired.version and not told.error,
                **({"error": told.error} if told.error else {}),
            }
        return {"desired": _shown(self._ledger.get(model)), "replicas": shown}

    def _model(self, model: str | None) -> str:
        """Raises: BadRequest without a name among several, ModelNotFound for one that nobody follows for."""
        names = list(self._followers)
        if model is None and len(names) != 1:
            raise BadRequest(f"Which model? There are {', '.join(names) or 'none yet'}.", param="model")
        if model is not None and model not in names:
            raise ModelNotFound(f"There is no model '{model}'; there are {', '.join(names) or 'none yet'}.")
        return model or names[0]

    async def _first_follower(self) -> None:
        """After a restart, replicas speak up within a second."""
        deadline = time.monotonic() + _FIRST_S
        while not self._followers and await self._news.before(deadline):
            pass

    def _asked(self, model: str, replica: str | None) -> list[str]:
        """Raises: BadRequest for a replica that is not one of the model's."""
        living = list(self.living(model))
        if replica is not None and replica not in living:
            raise BadRequest(
                f"Model '{model}' has no replica '{replica}'; it has {', '.join(living) or 'none'}.",
                param="replica",
            )
        return living if replica is None else [replica]

    async def _change(
        self, model: str, replica: str | None, operation: str, asked: Any, ids: Sequence[str], limit_s: float
    ) -> dict[str, Outcome]:
        before = self._ledger.get(model, replica or "")
        desired = self.declare(model, replica or "", operation, asked)

        def outcome(one: str) -> Outcome | None:
            told = self.living(model).get(one)
            if told is None or told.done < desired.version:
                return None
            return {"error": told.error} if told.error else {"result": told.actual}

        found = await self._outcomes_of(model, ids, outcome, limit_s, "It goes on trying; see the status.")
        told = [self.living(model).get(one) for one in ids]
        cannot = [one for one in told if one and one.done >= desired.version and one.unsupported]
        if cannot and len(cannot) == len(ids) and self._ledger.get(model, replica or "") == desired:
            # What none of them can be, one that comes later shall not wait for: asleep for ever, say.
            self._keep(model, msgspec.structs.replace(before, replica=replica or ""))
        return found

    def declare(self, model: str, replica: str, operation: str, asked: Any) -> Desired:
        """What is desired from now on."""
        return self._keep(model, changed(self._ledger.get(model, replica), operation, asked, replica))

    def _keep(self, model: str, wanted: Desired) -> Desired:
        """The same with its version."""
        self._version += 1
        desired = msgspec.structs.replace(wanted, version=self._version)
        self._ledger.set(model, desired)
        self._news.give()
        return desired

    def desired(self, model: str) -> Desired:
        return self._ledger.get(model)

    async def _ask(
        self, model: str, operation: str, arguments: Mapping[str, Any], ids: Sequence[str], limit_s: float
    ) -> dict[str, Outcome]:
        order = Order(next(self._numbers), operation, arguments)
        outcomes = self._outcomes[order.id] = {}
        for one in ids:
            self._followers[model][one].orders.append(order)
        self._news.give()
        try:
            return await self._outcomes_of(model, ids, outcomes.get, limit_s, "What it began goes on.")
        finally:
            del self._outcomes[order.id]

    async def _outcomes_of(
        self,
        model: str,
        ids: Sequence[str],
        outcome: Callable[[str], Outcome | None],
        limit_s: float,
        late: str,
    ) -> dict[str, Outcome]:
        """Of each replica; those that are gone, or late, are named, and nobody waits for them."""
        deadline, found = time.monotonic() + limit_s, dict[str, Outcome]()
        while True:
            for one in ids:
                if one not in found and (one not in self.living(model) or outcome(one) is not None):
                    found[one] = outcome(one) or {"error": f"The replica is gone. {_NEXT}"}
            if len(found) == len(ids) or time.monotonic() >= deadline:
                break
            await self._news.before(min(deadline, time.monotonic() + FOLLOW_S))
        missing = {"error": f"No answer within {limit_s:g} s. {late}"}
        return {one: found.get(one, missing) for one in ids}

    def living(self, model: str) -> dict[str, Told]:
        """What replicas have said that still speak."""
        followers, oldest = self._followers.get(model, {}), time.monotonic() - _GONE_S
        for replica in [one for one, follower in followers.items() if follower.at < oldest]:
            del followers[replica]
            self._ledger.forget(model, replica)
        return {replica: follower.told for replica, follower in followers.items() if follower.told}

    def idle_s(self, model: str) -> float:
        """Seconds since its replicas had a request: of the busiest one, counted on since it spoke."""
        idle = [self._followers[model][one].idle_s for one in self.living(model)]
        return min(idle, default=math.inf)

    def __del__(self) -> None:
        """Serve's shutdown hook: the application ends, or moves control, and replicas tell the next one."""
        if "_ledger" in self.__dict__:
            self._ledger.close(remove=True)


class _Signal:
    """Wakes all who wait for it."""

    def __init__(self) -> None:
        self._given = asyncio.Event()

    def give(self) -> None:
        self._given.set()
        self._given = asyncio.Event()

    async def before(self, deadline: float) -> bool:
        """Whether it was given before then."""
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._given.wait()
        except TimeoutError:
            return False
        return True


class _Gateway:
    """A gateway that speaks."""

    def __init__(self) -> None:
        self.told: Mapping[str, Moved] = {}
        self.at = 0.0

    def heard(self, told: Mapping[str, Moved]) -> bool:
        """Whether it is new."""
        known, self.told, self.at = self.told, told, time.monotonic()
        return known != told

    def outcome(self, model: str, application: str) -> Outcome:
        moved = self.told.get(model, Moved(""))
        if moved.application != application:
            return {"error": f"No replica of '{application or 'this application'}' is ready. {_LATER}"}
        if moved.open:
            return {"error": f"It has moved; {moved.open} requests before that are still open. {_LATER}"}
        return {"result": "shifted"}


class _Follower:
    """A replica that speaks."""

    def __init__(self) -> None:
        self.told: Told | None = None
        self.at = 0.0
        self.given = 0
        self.orders: list[Order] = []

    @property
    def idle_s(self) -> float:
        """0 for one that worked when it spoke, a few seconds ago."""
        idle_s = self.told.idle_s if self.told is not None else 0.0
        return idle_s and idle_s + time.monotonic() - self.at

    @property
    def changes(self) -> bool:
        """Whether it was given something to reach and has not said that it has, or that it could not."""
        return self.told is not None and max(self.given, self.told.desired.version) > self.told.done

    def heard(self, told: Told) -> bool:
        """Whether it is new; that time has passed is not."""
        known, self.told, self.at = self.told, told, time.monotonic()
        return known is None or msgspec.structs.replace(known, idle_s=told.idle_s) != told


def _find_model(model: str, application: str) -> None:
    """Raises: BadRequest when it is not there. Blocks."""
    name = deployment_name(model)
    known = serve.status().applications
    if application not in known or name not in known[application].deployments:
        raise BadRequest(
            f"There is no application '{application}' with the deployment '{name}'; "
            f"there are {', '.join(known)}.",
            param="application",
        )


def find() -> Any:
    """A handle to the control of this replica's application; None where it has none. Blocks.

    Raises: what Serve raises when its controller does not answer: a replica without control would never hear
    of other weights, and could not be put to sleep.
    """
    try:
        return serve.get_deployment_handle(NAME)
    except KeyError:  # the application has no such deployment
        return None


def _shown(desired: Desired) -> dict[str, Any]:
    weights = desired.weights.version if desired.weights else "default"
    state = "asleep" if desired.sleep else "paused" if desired.pause else "ready"
    return {"version": desired.version, "state": state, "weights": weights}
