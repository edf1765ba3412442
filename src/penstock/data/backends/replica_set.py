"""A deployment of ours behind Ray Serve: its replicas are asked at their own listeners, as gateways ask them.

It stands between the window and the members. Serve says who they are, now and then and whenever one is lost;
their links say how they are. No row passes through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from penstock.data.backends import serve_lookup
from penstock.data.backends.http_client import ConnectFailed, ConnectionLost, HttpResponse
from penstock.data.backends.json_fields import with_fields
from penstock.data.backends.protocol import Response
from penstock.data.backends.replica import ReplicaClient
from penstock.data.rows.request import Request
from penstock.engine import Load, Progress, no_progress
from penstock.errors import BadRequest, ConfigError, EngineDead, EngineStartFailed, Unavailable
from penstock.openai.errors import form
from penstock.transport import link
from penstock.transport.address import Address

log = logging.getLogger(__name__)

_LOOK_S, _AGAIN_S, _GAP_S = 2.0, 0.5, 0.1
_ANSWER_S = 10.0  # for all replicas to say where they listen
_CHECK_S = 2.0
_CANCEL_S = 0.5
_WAIT_S = 30.0  # of a row for a replica
_RETRY, _UNTOUCHED = link.RETRY.decode(), link.UNTOUCHED.decode()


class ReplicaSet:
    """The replicas of one deployment. Shared with whoever else asks them.

    deployment_name: needed where the application serves several models.
    """

    def __init__(self, app_name: str, deployment_name: str | None = None) -> None:
        self._app_name = app_name
        self._deployment_name = deployment_name
        self._asker = f"batch-{secrets.token_hex(8)}"
        self._deployment: serve_lookup.FoundDeployment | None = None
        self._members: dict[str, ReplicaClient] = {}
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._waking: asyncio.Task[None] | None = None

    async def start(self, progress: Progress = no_progress) -> None:
        """Returns when a replica is ready, which wakes a deployment that sleeps.

        Raises: Unavailable, ConfigError for names that are not there, EngineStartFailed as Serve has it.
        """
        if self._deployment is None:
            self._deployment = await serve_lookup.find(self._app_name, self._deployment_name)
        if self._watch is None or self._watch.done():
            await self._look(self._deployment)
            self._watch = asyncio.create_task(self._keep_looking(self._deployment))
        if not self._ready():
            progress("wait for a replica")
            await self._woken(self._deployment)

    async def stop(self) -> None:
        tasks = {task for task in (self._watch, self._waking) if task is not None}
        while tasks:  # Ray's awaitables now and then swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=_CANCEL_S)
        self._watch = self._waking = None
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(member.close() for member in members))

    async def send(self, request: Request) -> Response:
        refused: set[str] = set()
        while True:
            try:
                member = await self._choose(refused)
            except EngineStartFailed as error:
                raise Unavailable(str(error)) from error
            try:
                heard = await self._ask(member, request)
            except BadRequest as error:
                return Response(error.status, form(request.path).envelope(error))
            except ConnectFailed as error:
                log.info("Replica %s cannot be reached: %s", member.id, error)
                refused.add(member.id)
                continue
            except ConnectionLost as error:
                raise EngineDead("The replica ended with this request in it.") from error
            retry = heard.headers.get(_RETRY)
            if retry is None:
                return heard.to_response()
            if retry != _UNTOUCHED:
                raise EngineDead("The engine of the replica died with this request in it.")
            refused.add(member.id)

    def load(self) -> Load:
        """Of all replicas together; kv_usage of the fullest."""
        loads = [member.load() for member in self._ready()] or [Load()]
        return Load(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            sum(load.waiting_tokens for load in loads),
            max(load.kv_usage for load in loads),
        )

    def available_slots(self, in_flight: int) -> int:
        if not self._ready():
            return max(0, 1 - in_flight)  # one row, to wake a deployment that sleeps
        on_their_way = in_flight - sum(member.in_flight for member in self._members.values())
        return max(0, sum(member.available_slots() for member in self._ready()) - max(0, on_their_way))

    def _ready(self) -> list[ReplicaClient]:
        return [member for member in self._members.values() if member.ready]

    async def _choose(self, refused: set[str]) -> ReplicaClient:
        """The one with the most room. Raises: Unavailable when there is none for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_S):
                while not (able := [member for member in self._ready() if member.id not in refused]):
                    if not self._ready():
                        await self._woken(self._found())
                    else:
                        await self._news(_AGAIN_S)
                    refused.clear()
                return max(able, key=lambda member: (member.available_slots(), -member.busy))
        raise Unavailable(f"No replica of application '{self._app_name}' took the request in {_WAIT_S:g} s.")

    async def _ask(self, member: ReplicaClient, request: Request) -> HttpResponse:
        """Raises: NotReached, Cut; BadRequest for what no replica can be asked."""
        assert member.hello is not None
        own = member.hello.model_id
        named = request.model or own
        if request.prompt is not None:
            raise BadRequest("A fleet takes no prompt for the engine; the input must be in the body.")
        adapter = named.removeprefix(f"{own}:") if named.startswith(f"{own}:") else None
        if adapter is not None and not member.takes_adapters:
            raise BadRequest(f"Model '{own}' takes no adapters: it has no lora_config.", param="model")
        return await member.send(request.path, with_fields(request.body, {"model": named}), adapter)

    # -- who is there

    async def _keep_looking(self, deployment: serve_lookup.FoundDeployment) -> None:
        while True:
            await self._news(_LOOK_S if self._ready() else _AGAIN_S)
            await asyncio.sleep(_GAP_S)
            await self._look(deployment)

    async def _look(self, deployment: serve_lookup.FoundDeployment) -> None:
        """Raises: ConfigError when it is no deployment of ours."""
        try:
            response = deployment.handle.broadcast("door", serve_lookup.node_id())
            doors = await response.results_async(timeout_s=_ANSWER_S, return_exceptions=True)
        except (RayError, RayServeException, TimeoutError) as error:
            log.debug("%s: %s", deployment, error)
            doors = []
        for door in doors:
            if isinstance(door, dict):
                self._join(door)
            elif _is_foreign(door):
                raise ConfigError(f"{deployment} is none of Penstock's: ask it by a method of its own.")
        await self._let_go()

    def _join(self, door: dict[str, object]) -> None:
        replica_id = str(door["replica_id"])
        if replica_id not in self._members:
            address = Address.from_metadata(door)
            self._members[replica_id] = ReplicaClient(
                address, serve_lookup.node_id(), self._asker, self._tell
            )

    async def _let_go(self) -> None:
        for member in [member for member in self._members.values() if member.lost and not member.in_flight]:
            del self._members[member.id]
            await member.close()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _news(self, limit_s: float) -> None:
        """Returns when a member comes, goes, or begins to drain."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._changed.wait()

    def _found(self) -> serve_lookup.FoundDeployment:
        """Raises: Unavailable before `start`."""
        if self._deployment is None:
            raise Unavailable(f"Nothing is asked of application '{self._app_name}' before `start`.")
        return self._deployment

    async def _woken(self, deployment: serve_lookup.FoundDeployment) -> None:
        """Returns when a replica is ready; of many who wait one wakes. Raises: as `start`."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake(deployment))
        await asyncio.shield(self._waking)

    async def _wake(self, deployment: serve_lookup.FoundDeployment) -> None:
        """A call by handle makes Serve start a replica where there is none."""
        call = deployment.handle.options(method_name="door")
        waking = call.remote(serve_lookup.node_id())
        while not self._ready():
            await self._news(_CHECK_S)
            await deployment.check()
        waking.cancel()


def _is_foreign(error: object) -> bool:
    """Whether a replica has no door."""
    return isinstance(error, RayTaskError) and serve_lookup.is_no_method(error.cause)
