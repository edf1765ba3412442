"""A pool on a Ray cluster: engines in Ray actors, started together.

An actor gets rows, as bytes, and returns completed ones by one call, `step`, of which one runs at a time. It
writes outcomes into the journal itself.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import ray
from ray.exceptions import (
    ActorUnschedulableError,
    AuthenticationError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
    TaskUnschedulableError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.config import LLMConfig
from penstock.config.derive.placement import Placement, place, resolved
from penstock.data.backends.in_process import actor_options, in_process_engine
from penstock.data.backends.ray_cluster import connect
from penstock.data.execution.retry import RetryPolicy
from penstock.data.job.protocol import RowCompleted, WorkerHandle, WorkerLost, WorkerUpdate, WorkItem
from penstock.data.job.worker import BatchWorker
from penstock.data.journal.segment import Segment
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.engine import Progress
from penstock.errors import ConfigError, Error, Unavailable

_STOP_S = 30.0
_MOST_SILENCE_S = 300.0
"""A step takes half a second; more where its process gets no CPU. Ray sees the end of a process alone."""

_MESSAGE_AFTER_S = 20.0
"""Waiting for resources of the cluster, before a message says which."""

_encode, _decode_leases = msgspec.msgpack.encode, msgspec.msgpack.Decoder(list[WorkItem]).decode
_decode_step = msgspec.msgpack.Decoder(WorkerUpdate).decode
_decode_done = msgspec.msgpack.Decoder(list[RowCompleted]).decode


@dataclass(eq=False)
class RayActorPool:
    """`size` engines of one config on a Ray cluster, started here if there is none."""

    config: LLMConfig
    size: int
    address: str | None = None
    verbose: bool = False
    on_message: Callable[[str], None] | None = None

    def connect(self) -> Callable[[], None]:
        """Blocks the loop while Ray starts, since Ray stops with the thread that started it.

        Raises: Unavailable when no cluster answers.
        """
        cpus = self.size * max(1.0, self.options()[1].get("num_cpus", 1))
        disconnect = connect(
            self.address, cpus=int(cpus) + 1, verbose=self.verbose, on_message=self.on_message
        )
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.config = resolved(self.config, nodes)
        except BaseException:
            disconnect()
            raise
        return disconnect

    def make_worker(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> WorkerHandle:
        return _RayWorkerHandle(self, journal.url, segment, retry_policy)

    def options(self) -> tuple[Placement, dict[str, Any]]:
        """An engine's placement, and the options of its actor."""
        placement = place(self.config)
        return placement, actor_options(self.config, placement)


class _WorkerActor:
    """A worker and its engine, in the process of a Ray actor."""

    def __init__(self, config: LLMConfig, journal: str, segment: str, retry_policy: RetryPolicy) -> None:
        self._given = (config, journal, segment, retry_policy)
        self._worker: BatchWorker

    async def start(self) -> AsyncGenerator[str]:
        """Yields its process, then each phase as it begins. Ends when it can take rows.

        Raises: ConfigError when the journal is not there; what the engine raises.
        """
        yield f"process {os.getpid()}"
        config, journal, segment, retry_policy = self._given
        where = storage_path(journal)
        if where.is_local and not where.exists():
            node = ray.util.get_node_ip_address()
            raise ConfigError(
                f"'{journal}' does not exist on the node {node}, where an engine runs. Write the output to a "
                "bucket, or to a folder that all nodes share."
            )
        engine = in_process_engine(config)
        self._worker = BatchWorker(engine, partial(Segment, where, segment), retry_policy)
        phases: asyncio.Queue[str | None] = asyncio.Queue()
        starting = asyncio.create_task(self._worker.start(phases.put_nowait))
        starting.add_done_callback(lambda _: phases.put_nowait(None))
        while (phase := await phases.get()) is not None:
            yield phase
        starting.result()

    async def step(self, items: bytes, has_more: bool) -> bytes:
        return _encode(await self._worker.step(_decode_leases(items), has_more))

    async def stop(self) -> bytes:
        return _encode(await self._worker.stop())


class _RayWorkerHandle:
    """The driver's end of one actor."""

    def __init__(self, pool: RayActorPool, journal: str, segment: str, retry_policy: RetryPolicy) -> None:
        self._arguments = pool.config, journal, segment, retry_policy
        self._placement, self._options = pool.options()
        self._actor: Any = None
        self._group: PlacementGroup | None = None
        self._started = False
        self._name = segment

    async def start(self, progress: Progress) -> None:
        options, bundles = dict(self._options), [dict(bundle) for bundle in self._placement.bundles]
        if bundles:
            self._group = placement_group(bundles, strategy=self._placement.strategy)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_capture_child_tasks=True
            )
        made = ray.remote(_WorkerActor).options(max_restarts=0, **options)
        try:
            self._actor = made.remote(*self._arguments)
        except BaseException:
            self._remove_group()
            raise
        there = ray.cluster_resources()
        had = ", ".join(f"{name} {there.get(name, 0):g}" for name in ("CPU", "GPU"))
        wanted = bundles or [self._options]
        message = f"waiting for resources: it needs {wanted}; the cluster has {had} in all"
        waiting = asyncio.get_running_loop().call_later(_MESSAGE_AFTER_S, progress, message)
        progress("waiting for resources")
        try:
            async for phase in self._actor.start.options(num_returns="streaming").remote():
                waiting.cancel()
                progress(await phase)
        except RayError as error:
            raise _translate(error, self._name) from None
        finally:
            waiting.cancel()
        self._started = True

    async def step(self, items: list[WorkItem], has_more: bool) -> WorkerUpdate:
        try:
            async with asyncio.timeout(_MOST_SILENCE_S):
                return _decode_step(await self._actor.step.remote(_encode(items), has_more))
        except TimeoutError:
            silent = f"has been silent for {_MOST_SILENCE_S:g} s: it is stopped, or hangs"
            raise WorkerLost(f"The process of {self._name} {silent}.") from None
        except RayError as error:
            raise _translate(error, self._name) from None

    async def stop(self) -> list[RowCompleted]:
        done: list[RowCompleted] = []
        if self._actor is None:
            return done
        if self._started:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    done = _decode_done(await self._actor.stop.remote())
        with suppress(RayError):
            ray.kill(self._actor)
        self._actor = None
        self._remove_group()
        return done

    def _remove_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


def _translate(error: RayError, name: str) -> Error:
    """The meaning of a call's error: the worker's own, one that every worker would have, or a crash."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Error) else Unavailable(f"The worker failed: {cause!r}.")
    if isinstance(error, _FATAL):
        return Unavailable(f"Ray cannot start a worker: {error}")
    if isinstance(error, OutOfMemoryError):
        return WorkerLost(f"The process of {name} died: its node ran out of memory.")
    return WorkerLost(f"The process of {name} died.")


_FATAL = (ActorUnschedulableError, AuthenticationError, RuntimeEnvSetupError, TaskUnschedulableError)
