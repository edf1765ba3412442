"""The connections between the replicas of a gang, whose engines compute one model together.

Serve places, starts and restarts a gang as a whole. This adds how its members find each other while they
start, and how they notice at once that one has gone. The first member, the leader, listens; the others
connect to it. The end of a connection ends the gang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError

from penstock.errors import EngineStartFailed
from penstock.request_context import Gang

log = logging.getLogger(__name__)

_NAMESPACE = "penstock"
_LEAVING: Mapping[str, Any] = {"over": True}
_SECRET_S = 10.0  # for a member that connects to send the secret
_JOIN_S = 120.0
"""For all members to start their processes; Serve has already reserved their resources."""


LeaderAddress = tuple[str, int, str]
"""Where the leader listens: host and port, and the secret that it expects."""


class Rendezvous:
    """A Ray actor that lives until all members are connected. The first one to arrive creates it."""

    def __init__(self) -> None:
        self._first: asyncio.Future[LeaderAddress] = asyncio.get_running_loop().create_future()

    async def open(self, first: LeaderAddress) -> None:
        self._first.set_result(first)

    async def find(self) -> LeaderAddress:
        return await self._first


class GangLink:
    """One member's side. A message is a line of JSON: what the leader shares, or `_LEAVING`."""

    def __init__(self, rank: int, size: int, host: str) -> None:
        self.gang = Gang(rank, size, host, self._share)
        self._writers: dict[int, StreamWriter] = {}
        self._shared: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._leaving = 0
        self._ended = asyncio.Event()
        self.broken = asyncio.Event()
        """Set when a member has gone."""
        self.complete = asyncio.Event()
        """For the leader: set when every other member is connected."""
        self.meeting: asyncio.Task[None] | None = None
        """Connects in the background; `share` raises what this raises."""
        self._receiving: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None

    async def leave(self, deadline: float) -> None:
        """Returns when all members want to leave: until then the others' engines need this one's.

        deadline: by the monotonic clock; it returns then in any case.
        """
        self._ready_to_leave()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), deadline - time.monotonic())
        self.close()

    def close(self) -> None:
        """Leaves at once."""
        if self._receiving is not None:
            self._receiving.cancel()
        for writer in self._writers.values():
            writer.close()
        if self._server:
            self._server.close()

    # -- the leader

    async def listen(self) -> LeaderAddress:
        """Accepts members that send the secret, and refuses other connections."""
        secret = secrets.token_hex(16)

        async def accept(reader: StreamReader, writer: StreamWriter) -> None:
            try:
                async with asyncio.timeout(_SECRET_S):
                    line = await reader.readline()
            except (TimeoutError, OSError, ValueError):  # the last: too long a line
                line = b""
            rank, _, sent = line.decode(errors="replace").strip().partition(" ")
            if not secrets.compare_digest(sent.encode(), secret.encode()):
                writer.close()
                return
            self._writers[int(rank)] = writer
            if len(self._writers) == self.gang.size - 1:
                self.complete.set()
            await self._receive(reader)

        self._server = await asyncio.start_server(accept, self.gang.host, 0)
        return self.gang.host, self._server.sockets[0].getsockname()[1], secret

    # -- the others

    async def connect(self, host: str, port: int, secret: str) -> None:
        """Raises: OSError when the leader has gone."""
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"{self.gang.rank} {secret}\n".encode())
        self._writers[0] = writer
        self._receiving = asyncio.create_task(self._receive(reader))

    # -- both

    async def _share(self, message: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Returns what the leader passes; the others wait for it."""
        if self.meeting is not None:
            await asyncio.shield(self.meeting)
        if self.gang.rank:
            return await self._shared.get()
        assert message is not None, "only the leader passes something"
        self._send(message)
        return message

    def _send(self, message: Mapping[str, Any]) -> None:
        for writer in self._writers.values():
            writer.write(msgspec.json.encode(message) + b"\n")

    async def _receive(self, reader: StreamReader) -> None:
        """Until the connection ends."""
        try:
            while line := await reader.readline():
                message = msgspec.json.decode(line)
                if message != _LEAVING:
                    self._shared.put_nowait(message)
                elif self.gang.rank:
                    self._ended.set()
                else:
                    self._ready_to_leave()
        except (OSError, ValueError) as error:  # the last: invalid JSON, or too long a line
            log.info("The connection to another member of the gang ended: %s", error)
        finally:
            self.broken.set()
            self._ended.set()

    def _ready_to_leave(self) -> None:
        """The leader counts each member; another member counts itself and tells the leader."""
        self._leaving += 1
        if self.gang.rank or self._leaving == self.gang.size:
            self._send(_LEAVING)
        if self._leaving == self.gang.size:
            self._ended.set()


def join(model_id: str) -> GangLink:
    """Connects this replica to its gang, while its engine starts.

    Raises: EngineStartFailed when it is in no gang.
    """
    context = serve.get_replica_context().gang_context
    if context is None:
        raise EngineStartFailed(
            f"Model '{model_id}' needs replicas in gangs: deploy it with the options of its config."
        )
    gang_link = GangLink(context.rank, context.world_size, ray.util.get_node_ip_address())
    gang_link.meeting = asyncio.create_task(_meet(gang_link, context.gang_id, model_id))
    return gang_link


async def _meet(gang_link: GangLink, gang_id: str, model_id: str) -> None:
    """Raises: EngineStartFailed when a member did not connect, or has gone."""
    options = {"name": f"gang-{gang_id}", "namespace": _NAMESPACE, "get_if_exists": True}
    try:
        async with asyncio.timeout(_JOIN_S):
            meeting: Any = ray.remote(num_cpus=0)(Rendezvous).options(**options).remote()
            if gang_link.gang.rank:
                await gang_link.connect(*await meeting.find.remote())
            else:
                await meeting.open.remote(await gang_link.listen())
                await gang_link.complete.wait()
                ray.kill(meeting)
    except (TimeoutError, OSError, RayError) as error:
        raise EngineStartFailed(
            f"Model '{model_id}' cannot start: not all {gang_link.gang.size} replicas of its gang have "
            "connected."
        ) from error
