"""Control: keeps the desired state of each model's replicas, and has operations performed on them.

A deployment of one replica. Replicas and gateways keep a link to it. Requests do not pass through it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from penstock import json_logs
from penstock.asgi import Receive, Scope, Send, read_body
from penstock.config.derive.serve_options import deployment_name
from penstock.config.schema.settings import Settings
from penstock.errors import BadRequest, Error, NotFound, Unavailable
from penstock.openai.asgi_response import send_body, send_error
from penstock.serve.control import link, operations
from penstock.serve.control.application import known
from penstock.serve.control.canary import Canaries
from penstock.serve.control.desired import DesiredStates, file_name
from penstock.serve.control.fleet import FleetVersions
from penstock.serve.control.followers import Followers
from penstock.serve.control.gateways import Gateways
from penstock.serve.control.link import FromFollower
from penstock.serve.control.operations import CHANGES, SHIFT
from penstock.serve.control.state import (
    NAME,
    TIMEOUT_S,
    AdapterSources,
    DesiredState,
    Done,
    GatewayStatus,
    Outcome,
    ReplicaStatus,
    Routes,
    Update,
)
from penstock.serve.control.time_sharing import TimeSharing
from penstock.serve.control.webhook import Webhook
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.tenancy import organization
from penstock.serve.tenancy.prices import NANO
from penstock.serve.tenancy.store import UsageStore, since_s, usage_file
from penstock.serve.tenancy.usage import Settlement

log = logging.getLogger(__name__)


class LLMControl:
    """Of one application. Call it by handle: `serve.get_deployment_handle("LLMControl", app_name)`."""

    async def __init__(self, port: int | None = None) -> None:
        """port: the gateway's own, for which gateways restart, too. Nothing else: Serve restarts a deployment
        whose arguments change.
        """
        json_logs.configure()
        context, app = ray.get_runtime_context(), serve.get_replica_context().app_name
        # KubeRay's name: workers know the head by another address than itself, and a new head has a new one.
        cluster = os.environ.get("RAY_CLUSTER_NAME") or context.gcs_address
        name = file_name(cluster, app, context.get_session_name())
        file = Settings.read().cache_folder() / "control" / name
        await self.open(file, app, context.get_node_id(), ray.util.get_node_ip_address(), port)
        self._watching = asyncio.create_task(self._gateways.watch(self._forget))
        self._fleet.resume()

    async def open(self, file: Path, app: str, node_id: str, node_host: str, port: int | None = None) -> None:
        """Begins to listen for followers. file: of the desired state. app: the application's name. port: its
        gateway's.
        """
        self._app, self._port = app, port
        self._desired = DesiredStates(file)
        self._followers = Followers(self._desired)
        self._canaries = Canaries(
            self._desired.connection, self._desired.changed.send, lambda text: self._fleet.remark(text)
        )
        self._gateways = Gateways(self._desired, app, self._canaries.states)
        self._fleet = FleetVersions(
            self._desired.connection,
            app,
            self._gateways.faults,
            port,
            self._followers.adapters,
            self._followers.retry_adapters,
        )
        self._time_sharing = TimeSharing(self._desired, self._followers, self.perform)
        self._watching: asyncio.Task[None] | None = None
        self._looking = asyncio.create_task(self._canaries.watch())
        self._usage_store: UsageStore | None = None
        secret = Settings.read().webhook_secret
        self._webhook = Webhook(secret.get_secret_value() if secret is not None else "")
        self._listener = await PrivateListener.open(self._serve, NAME, node_id, node_host)

    async def reconfigure(self, user_config: Mapping[str, Mapping[str, Any]]) -> None:
        """Serve's hook: `live_adapters` by model, which replicas hear from here. One that Serve reconfigures
        is not among those that it names to gateways meanwhile.
        """
        self._followers.set_adapters(
            {model: AdapterSources(_digest(fields), fields) for model, fields in user_config.items()}
        )

    async def close(self) -> None:
        """Ends the links."""
        self._desired.changed.close()
        self._fleet.close()
        self._looking.cancel()
        self._webhook.close()
        await self._listener.close(grace_s=0.2)
        self._desired.close()
        if self._usage_store is not None:
            self._usage_store.close()

    def _forget(self, deployments: Iterable[str]) -> None:
        """Forgets models that Serve and gateways have no longer: one that comes back begins anew."""
        there = {*deployments, *map(deployment_name, self._gateways.models())}
        for model in self._followers.models():
            if deployment_name(model) not in there and not self._followers.living(model):
                self._followers.forget(model)
                self._time_sharing.forget(model)
                self._desired.forget(model)

    # -- what followers ask, at the listener

    async def address(self, node_id: str) -> dict[str, str | int | None]:
        """The address of its listener, for a follower on that node."""
        return await self._listener.address(node_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path == link.PATH:
            return await link.serve(scope, receive, send, self._hear, self._updates)
        calls = {
            "perform": self.perform,
            "status": self.status,
            "wake": self._time_sharing.wake,
            "settle": self.settle,
            "usage": self.usage,
            "organization": self.organization,
            "canaries": self.canaries,
            "fleet": self._fleet.show,
            "fleet/history": self.history,
            "fleet/audit": self.audit,
            "fleet/plan": self._fleet.plan,
            "fleet/apply": self._fleet.apply,
            "fleet/rollback": self._fleet.rollback,
        }
        call = calls.get(path.removeprefix(f"{link.PATH}/"))
        try:
            if call is None:
                raise NotFound(f"Control has no {path}.")
            arguments = msgspec.json.decode(await read_body(receive))
            who = arguments.pop("changed_by", None)
            result = await call(**arguments)
            if who is not None and (text := _changed(arguments, result or {})):
                await asyncio.to_thread(self._usage().note, who, text)
        except Error as error:
            await send_error(send, error, path)
        except sqlite3.Error as error:  # as of a full disk
            await send_error(send, Unavailable(f"Control cannot use its database: {error}."), path)
        except (RayError, RayServeException) as error:  # its controller restarts
            log.info("Ray Serve cannot be asked for %s", path, exc_info=error)
            await send_error(send, Unavailable("Ray Serve does not answer; try again in a moment."), path)
        except asyncio.CancelledError:  # it ends while Serve is asked, and the next control answers
            await send_error(send, Unavailable("Control restarts; try again in a moment."), path)
            raise
        else:
            await send_body(send, msgspec.json.encode(result, enc_hook=repr))

    def _hear(self, message: FromFollower) -> None:
        if isinstance(message, Done):
            self._followers.done(message.command, message.replica, message.outcome)
        elif isinstance(message, GatewayStatus):
            self._canaries.hear(message.gateway, message.canaries)
            self._gateways.hear(msgspec.structs.replace(message, canaries=()))
        else:
            self._followers.hear(message)
            self._time_sharing.hear(message)

    def _updates(self, first: ReplicaStatus | GatewayStatus) -> AsyncGenerator[Update | Routes]:
        if isinstance(first, GatewayStatus):
            return self._gateways.updates(first.gateway)
        return self._followers.updates(first.model, first.replica)

    # -- what tenants have used

    async def settle(self, **settlement: Any) -> Any:
        """Stores what a process has counted. Takes a `Settlement`, returns `Totals`, as plain values."""
        given = msgspec.convert(settlement, Settlement)
        totals = await asyncio.to_thread(self._usage().settle, given)
        self._webhook.follow(given.webhook, self._usage())
        return msgspec.to_builtins(totals)

    async def usage(self, by: str = "tenant", since: str = "30d", until: str = "") -> dict[str, Any]:
        """Sums by `DIMENSIONS`, named with commas. since, until: `7d`, `12h` or a date; without `until`, to
        now. Raises: BadRequest.
        """
        names, now = [name for name in by.split(",") if name], time.time()
        begin, end = since_s(since, now), since_s(until, now, "until") if until else None
        rows = await asyncio.to_thread(self._usage().usage, names, begin, end)
        data = [{**row, "cost": row["cost"] / NANO} for row in rows]
        return {"object": "list", "since": int(begin), "data": data}

    async def organization(self, kind: str, query: dict[str, list[str]]) -> dict[str, Any]:
        """As OpenAI's API of that name has it. Raises: BadRequest, NotFound."""
        return await asyncio.to_thread(organization.page, kind, query, self._usage().usage)

    async def audit(self) -> dict[str, Any]:
        """Who has changed what, the newest first."""
        return {"object": "list", "data": await asyncio.to_thread(self._usage().audit)}

    def _usage(self) -> UsageStore:
        """Opened by the first that needs it. It is the service's in all its clusters."""
        if self._usage_store is None:
            self._usage_store = UsageStore(usage_file(self._app, self._port))
        return self._usage_store

    # -- the fleet's file

    async def record(
        self, start: dict[str, Any], fleet: dict[str, Any], who: str, deployments: dict[str, str | None]
    ) -> None:
        """Says what runs, once it does; see `FleetVersions.record`."""
        self._fleet.record(start, fleet, who, deployments)
        await self.note(who, "started the fleet")

    async def note(self, who: str, text: str) -> None:
        """Adds to the audit log."""
        await asyncio.to_thread(self._usage().note, who, text)

    async def save(self, fleet: dict[str, Any], who: str, changed_only: bool = False) -> str:
        """Applies a fleet whose file was saved, see `FleetVersions.save`. Returns what begins, or what is
        wrong; "" for no change.
        """
        try:
            begun = await self._fleet.save(fleet, who, changed_only)
        except Error as error:
            text = f"Nothing changes: {error}"
            await self.note(who, text)
            return text
        if isinstance(begun, str):
            if begun:
                await self.note(who, begun)
            return begun
        await self.note(who, _changed({}, begun))
        return f"Applying version {begun['version']} of the fleet: {begun['what']}."

    async def canaries(self) -> dict[str, Any]:
        """Their states, by key."""
        return msgspec.to_builtins(self._canaries.states())

    async def history(self) -> dict[str, Any]:
        """Versions of the fleet, the newest first."""
        return {"object": "list", "data": msgspec.to_builtins(self._fleet.history())}

    # -- what operators call

    async def perform(
        self,
        operation: str,
        model: str | None = None,
        replica: str | None = None,
        timeout_s: float = TIMEOUT_S,
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
            try:
                msgspec.json.encode(arguments)
            except (TypeError, ValueError) as error:
                raise BadRequest(f"{operation}: the arguments must be values of JSON: {error}.") from error
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
            name, found = deployment_name(model), await asyncio.to_thread(known)
            if application not in found or name not in found[application].deployments:
                raise BadRequest(
                    f"There is no application '{application}' with the deployment '{name}'; "
                    f"there are {', '.join(found)}.",
                    param="application",
                )
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
                **({"error": error} if (error := status.error or status.adapters_fault) else {}),
            }
        return {"desired": _shown(self._desired.get(model)), "replicas": shown}

    def check_health(self) -> None:
        """Serve's hook."""
        self._listener.check()
        self._desired.check()

    def __del__(self) -> Any:
        """Serve's shutdown hook: Serve awaits what it returns."""
        return self._end() if self.__dict__.get("_watching") else None

    async def _end(self) -> None:
        """In an update the next control goes on with the state; the application's end removes it."""
        if self._watching is not None:
            self._watching.cancel()
        if await self._gateways.is_app_ending():
            self._desired.remove()
        await self.close()


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]


def _changed(arguments: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """For the audit log: an operation, or a new version of the fleet; "" for a rollback to what runs."""
    if "version" in result:
        if result["plan"]["is_empty"] and "fleet" not in arguments:
            return ""
        return f"version {result['version']} of the fleet, as {result['who']}: {result['what']}"
    on = f" on {arguments['replica']}" if arguments.get("replica") else ""
    failed = "" if result["ok"] else ": failed"
    return f"{arguments['operation']} of {result['model']}{on}{failed}"


def _shown(desired: DesiredState) -> dict[str, Any]:
    weights = desired.weights.version if desired.weights else "default"
    state = "asleep" if desired.sleep else "paused" if desired.pause else "ready"
    return {"version": desired.version, "state": state, "weights": weights}
