"""Membership: Serve's list of running replicas, passed to this process's gateway.

Serve pushes it to the router of every deployment handle. `Publishing` passes it to the watcher of the model,
on the watcher's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import cloudpickle
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import (
    FIFOMixin,
    MultiplexMixin,
    PendingRequest,
    RequestRouter,
    RunningReplica,
)

from penstock.errors import ConfigError
from penstock.transport.address import Address

Members = Mapping[str, Address]
_MODEL = "penstock_model_id"
ADAPTERS = "adapters"
"""In a replica's routing stats: the adapters that it has loaded."""

Watcher = tuple[asyncio.AbstractEventLoop, Callable[[Members], None]]

_watchers: dict[tuple[str, str], dict[DeploymentHandle[Any], Watcher]] = {}
"""By model and application, of each handle that is followed."""

_latest: dict[tuple[str, str], Members] = {}
"""What was published last. A call by the handle may have started its router before anyone follows it, and the
router says nothing more until a replica comes or goes."""

_lock = threading.Lock()  # the router has a thread of its own


def follow(model_id: str, handle: DeploymentHandle[Any], seen: Callable[[Members], None]) -> None:
    """Calls `seen` on the running loop with all replicas of a model behind `handle`: with those that are
    known, and at every change."""
    loop, key = asyncio.get_running_loop(), (model_id, handle.app_name)
    with _lock:
        _watchers.setdefault(key, {})[handle] = loop, seen
        if key in _latest:
            loop.call_soon(_tell, key, handle, _latest[key])
    handle.options(method_name="llm_config")  # starts the handle's router


def unfollow(model_id: str, handle: DeploymentHandle[Any]) -> None:
    """Ends `follow`, whose `seen` is not called any more: forgets the replicas behind `handle`."""
    key = model_id, handle.app_name
    with _lock:
        watchers = _watchers.get(key, {})
        watchers.pop(handle, None)
        if not watchers:
            _watchers.pop(key, None)
            _latest.pop(key, None)


def publish(model_id: str, application: str, members: Members) -> None:
    """Passes `members` to the watcher, or keeps them for one. Thread-safe."""
    key = model_id, application
    with _lock:
        _latest[key] = members
        for handle, (loop, _) in _watchers.get(key, {}).items():
            with contextlib.suppress(RuntimeError):  # a loop that has ended: a program's, at its end
                loop.call_soon_threadsafe(_tell, key, handle, members)


def _tell(key: tuple[str, str], handle: DeploymentHandle[Any], members: Members) -> None:
    """Unless it has been unfollowed since."""
    if (watcher := _watchers.get(key, {}).get(handle)) is not None:
        watcher[1](members)


class Publishing(RequestRouter):
    """Has a router pass on the replicas that Serve names to it: for gateways, the source of membership.

    Serve may pickle this class by value and runs it on the router's thread, so `publish` is imported where
    it is called: module globals would be copies.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._published = kwargs.pop(_MODEL)
        super().initialize_state(**kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve whenever a replica comes or goes. Those that have an address are published."""
        super().update_replicas(replicas)
        from penstock.serve.fleet.membership import publish
        from penstock.transport.address import Address

        metadata = [replica.replica_metadata for replica in replicas]
        addresses = [Address.from_metadata(entry) for entry in metadata if "replica_id" in entry]
        members = {address.replica_id: address for address in addresses}
        publish(self._published, self._deployment_id.app_name, members)


class FleetRouter(FIFOMixin, MultiplexMixin, RequestRouter):
    """For calls by handle, the less busy of two replicas."""

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


def router_config(model_id: str, given: Any, options: Mapping[str, Any]) -> RequestRouterConfig:
    """Serve's config of a router class, which publishes membership, too.

    given: as for `imported_router`. options: others of Serve's, and the class's own `request_router_kwargs`.
    Raises: ConfigError.
    """
    router = imported_router(given)

    class Published(Publishing, router):
        """What Serve runs."""

    kwargs = {**options.get("request_router_kwargs", {}), _MODEL: model_id}
    module = sys.modules[router.__module__]
    cloudpickle.register_pickle_by_value(module)  # as Serve does: gateways may be unable to import a script
    try:
        serialized = cloudpickle.dumps(Published)  # pyright: ignore[reportPrivateImportUsage]
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    path = f"{router.__module__}.{router.__name__}"
    config = {**options, "request_router_class": path, "request_router_kwargs": kwargs}
    return RequestRouterConfig.from_serialized_request_router_cls(config, serialized)


def is_published(router: Any) -> bool:
    """Whether Serve's `request_router_config` is one that publishes membership already."""
    return isinstance(router, RequestRouterConfig) and _MODEL in router.request_router_kwargs


def imported_router(given: Any) -> type[RequestRouter]:
    """The class that `given` is, or the path of; ours for None. Raises: ConfigError."""
    found: Any = given or FleetRouter
    if isinstance(found, str):
        module, _, name = found.replace(":", ".").rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:  # importing is the user's own code
            raise ConfigError(f"{given!r} cannot be imported: {type(error).__name__}: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, RequestRouter)):
        raise ConfigError(
            f"{given!r} is no subclass of ray.serve.request_router.RequestRouter. A policy of the gateway "
            "goes into `routing_policy`."
        )
    return found
