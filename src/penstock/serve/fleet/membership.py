"""Membership: Serve's list of running replicas, passed to this process's gateway.

Serve pushes it to the router of every deployment handle. `FleetRouter` passes it to the watcher of the model,
on the watcher's event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from penstock.transport.address import Address

Members = Mapping[str, Address]
ADAPTERS = "adapters"
"""In a replica's routing stats: the adapters that it has loaded."""

_watchers: dict[tuple[str, str], tuple[asyncio.AbstractEventLoop, Callable[[Members], None]]] = {}
"""By model and application."""


def follow(model_id: str, handle: DeploymentHandle[Any], seen: Callable[[Members], None]) -> None:
    """Calls `seen` on the running loop with all replicas of a model behind `handle`, at every change."""
    _watchers[model_id, handle.app_name] = (asyncio.get_running_loop(), seen)
    handle.options(method_name="llm_config")  # starts the handle's router


def publish(model_id: str, application: str, members: Members) -> None:
    """Passes `members` to the watcher, if there is one. Thread-safe."""
    if (model_id, application) in _watchers:
        loop, seen = _watchers[model_id, application]
        loop.call_soon_threadsafe(seen, members)


class FleetRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """For calls by handle, the less busy of two replicas. For the gateway, the source of membership.

    Serve pickles this class by value and runs it on the router's thread, so `publish` is imported where it
    is called: module globals would be copies.
    """

    model_id = ""

    def initialize_state(self, model_id: str = "", **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`model_id` comes from `request_router_kwargs`."""
        self.model_id = model_id

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve whenever a replica comes or goes."""
        super().update_replicas(replicas)
        from penstock.serve.fleet.membership import publish

        metadata = [replica.replica_metadata for replica in replicas]
        addresses = [Address.from_metadata(entry) for entry in metadata if "replica_id" in entry]
        application = self._deployment_id.app_name
        publish(self.model_id, application, {address.replica_id: address for address in addresses})

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Two at random: Serve takes the one with the shorter queue. Those with the adapter come first."""
        if not candidate_replicas:
            return []
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        wanted = pending_request.metadata.multiplexed_model_id if pending_request is not None else ""
        return [_with_adapter(wanted, candidate_replicas), two] if wanted else [two]


def _with_adapter(wanted: str, replicas: list[RunningReplica]) -> list[RunningReplica]:
    """Two that have it loaded; if none has, always the same one, so that it is loaded once."""
    name = wanted.rpartition(":")[2]
    having = [replica for replica in replicas if name in replica.routing_stats.get(ADAPTERS, ())]
    if having:
        return random.sample(having, min(2, len(having)))
    return [max(replicas, key=lambda replica: crc32(f"{name} {replica.replica_id}".encode()))]
