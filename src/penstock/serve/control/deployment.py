"""Control: keeps the desired state of each model's replicas, and has operations performed on them.

A deployment of one replica. Replicas and gateways long-poll it. Requests do not pass through it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray import serve

from penstock import json_logs
from penstock.config.derive.serve_options import deployment_name
from penstock.config.schema.settings import Settings
from penstock.errors import BadRequest
from penstock.serve.control import operations, store
from penstock.serve.control.desired import DesiredStates, Signal
from penstock.serve.control.followers import Followers
from penstock.serve.control.gateways import Gateways
from penstock.serve.control.operations import CHANGES, SHIFT
from penstock.serve.control.state import FOLLOW_S, DesiredState, Outcome, ReplicaStatus, RouteStatus, Update
from penstock.serve.control.store import StateStore
from penstock.serve.control.time_sharing import TimeSharing

_TIMEOUT_S = 300.0


class LLMControl:
    """Of one application. Call it by handle: `serve.get_deployment_handle("LLMControl", app_name)`."""

    def __init__(self) -> None:
        """Without arguments: Serve restarts a deployment whose arguments change."""
        json_logs.configure()
        context, app = ray.get_runtime_context(), serve.get_replica_context().app_name
        file = store.file_name(context.gcs_address, app, context.get_session_name())
        self._app = app
        self._store = StateStore(Settings.read().cache_folder() / "control" / file)
        changed = Signal()
        self._desired = DesiredStates(self._store, changed)
        self._followers = Followers(self._desired, changed)
        self._gateways = Gateways(self._desired, changed)
        self._time_sharing = TimeSharing(self._desired, self._followers, self.perform)

    # -- what replicas call

    async def follow(self, model: str, status: ReplicaStatus, wait_s: float = FOLLOW_S) -> Update:
        """The update for the replica that reports: at once if there is one, else after `wait_s`."""
        self._followers.hear(model, status)
        self._time_sharing.hear(model, status)
        return await self._followers.update(model, status, wait_s)

    async def done(self, command: int, replica: str, outcome: Outcome) -> None:
        """The outcome of a command."""
        self._followers.done(command, replica, outcome)

    # -- what gateways call

    async def routes(
        self,
        gateway: str,
        status: Mapping[str, RouteStatus],
        known: Mapping[str, str],
        wait_s: float = FOLLOW_S,
    ) -> Mapping[str, str]:
        """The application that answers for a model, by model, where it is not the gateway's own."""
        return await self._gateways.routes(gateway, status, known, wait_s)

    async def wake(self, model: str, idle_s: Mapping[str, float]) -> None:
        """For a request to a model that shares memory: returns once it is awake.

        idle_s: seconds since that gateway's last request to each model.
        """
        self._time_sharing.note_idle(idle_s)
        await self._time_sharing.wake(model)

    # -- what operators call

    async def perform(
        self,
        operation: str,
        model: str | None = None,
        replica: str | None = None,
        timeout_s: float = _TIMEOUT_S,
        **arguments: Any,
    ) -> dict[str, Any]:
        """Performs one of `OPERATIONS` on all replicas of a model, or on one; `shift` on its gateways.

        A state is kept: replicas that start later take it, too, and those that did not reach it within
        `timeout_s` keep trying. Returns {"model", "ok", "replicas": {id: {"result"} or {"error"}}}; for
        `shift`, ids are those of gateways. Raises: BadRequest, ModelNotFound.
        """
        parsed = operations.parse(operation, arguments)
        await self._followers.wait_for_first()
        name = self._followers.model(model)
        ids = self._followers.replicas(name, replica)
        if operation == SHIFT:
            results = await self._shift(name, parsed.application, timeout_s)
        elif operation in CHANGES:
            results = await self._change(name, replica or "", operation, parsed, ids, timeout_s)
        else:
            results = await self._followers.command(name, ids, operation, arguments, timeout_s)
        return {"model": name, "ok": not any("error" in one for one in results.values()), "replicas": results}

    async def status(self, model: str | None = None) -> dict[str, Any]:
        """Desired and actual state of every replica, by model."""
        await self._followers.wait_for_first()
        names = [self._followers.model(model)] if model is not None else self._followers.models()
        return {name: self._model_status(name) for name in names}

    async def _shift(self, model: str, application: str, timeout_s: float) -> dict[str, Outcome]:
        """The application's own name, or "", moves the model back."""
        application = "" if application == self._app else application
        if application:
            await asyncio.to_thread(_check_application, model, application)
        return await self._gateways.shift(model, application, timeout_s)

    async def _change(
        self, model: str, replica: str, operation: str, arguments: Any, ids: Sequence[str], timeout_s: float
    ) -> dict[str, Outcome]:
        before = self._desired.get(model, replica)
        desired = self._desired.change(model, replica, operation, arguments)

        def reached(one: str) -> ReplicaStatus | None:
            status = self._followers.living(model).get(one)
            return status if status is not None and status.version >= desired.version else None

        def outcome(one: str) -> Outcome | None:
            if (status := reached(one)) is None:
                return None
            return {"error": status.error} if status.error else {"result": status.actual}

        late = "It keeps trying; see the status."
        outcomes = await self._followers.outcomes(model, ids, outcome, timeout_s, late)
        refused = [one for one in ids if (status := reached(one)) is not None and status.unsupported]
        if ids and len(refused) == len(ids) and self._desired.get(model, replica) == desired:
            # Taken back: replicas that start later must not wait for a state that none of them can reach.
            self._desired.set(model, msgspec.structs.replace(before, replica=replica))
        return outcomes

    def _model_status(self, model: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for replica, status in self._followers.living(model).items():
            desired = self._desired.get(model, replica)
            shown[replica] = {
                **({"role": status.role} if status.role else {}),
                "actual": status.actual,
                "weights": status.weights,
                "desired": _shown(desired),
                "reached": status.version >= desired.version and not status.error,
                **({"error": status.error} if status.error else {}),
            }
        return {"desired": _shown(self._desired.get(model)), "replicas": shown}

    def __del__(self) -> None:
        """Serve's shutdown hook. If control only moves, replicas report their state to the next one."""
        if "_store" in self.__dict__:
            self._store.close(remove=True)


def _check_application(model: str, application: str) -> None:
    """Blocks. Raises: BadRequest when it does not serve the model."""
    name = deployment_name(model)
    known = serve.status().applications
    if application not in known or name not in known[application].deployments:
        raise BadRequest(
            f"There is no application '{application}' with the deployment '{name}'; "
            f"there are {', '.join(known)}.",
            param="application",
        )


def _shown(desired: DesiredState) -> dict[str, Any]:
    weights = desired.weights.version if desired.weights else "default"
    state = "asleep" if desired.sleep else "paused" if desired.pause else "ready"
    return {"version": desired.version, "state": state, "weights": weights}
