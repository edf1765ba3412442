"""Rows of all batches to the replicas of their models, as `penstock batch --app` sends them.

One connection to each model's replicas serves all batches; what the replicas can take is shared out between
those that wait for it. Above it: the window of each batch. Below it: `data.backends.replica_set`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from penstock.data.backends.protocol import Response
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.job.protocol import WorkerPool
from penstock.data.job.worker import InProcessPool
from penstock.data.rows.request import RowRequest, with_fields
from penstock.engine import Progress, no_progress
from penstock.errors import ConfigError, Error, Unavailable
from penstock.jobs.records import BatchRecord
from penstock.jobs.turns import Claim, Standing, share
from penstock.jobs.validation import Resolve
from penstock.openai.cache_salt import own_salt, salted
from penstock.openai.errors import form

_HUNGRY_S = 0.1
"""A batch that got no slot for so long does not want any: the window of one that does asks every 5 ms."""

_ROWS_WITHOUT_MODEL = 8
_LOOK_S = 0.5
_REMOVED = "The model '{}' has just been removed, or replaced."


class Fleet:
    """The replicas of all models of an application."""

    def __init__(self, app_name: str, deployments: Mapping[str, str]) -> None:
        """deployments: their names, by model id."""
        self._app_name = app_name
        self._deployments = dict(deployments)
        self._sets = {model: ReplicaSet(app_name, name) for model, name in deployments.items()}
        self._starting = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self.isolate_cache = False
        """Whether rows of tenants share no prefix cache."""
        self._leaving: set[asyncio.Task[None]] = set()
        self.views: set[_View] = set()
        self.open = Counter[ReplicaSet]()
        """Rows in flight, and starts."""

    def follow(self, deployments: Mapping[str, str]) -> None:
        """From now on there are these; rows in flight to others end. Batches find what a row needs."""
        before, self._deployments = self._deployments, dict(deployments)
        gone = [self._sets.pop(model) for model, name in before.items() if deployments.get(model) != name]
        for model in deployments.keys() - self._sets.keys():
            self._sets[model] = ReplicaSet(self._app_name, deployments[model])
        for view in self.views:
            view.forget(self._sets)
        for one in gone:
            self._leaving.add(task := asyncio.create_task(self._leave(one)))
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, replicas: ReplicaSet) -> None:
        while self.open[replicas]:  # noqa: ASYNC110 - it is rare
            await asyncio.sleep(_LOOK_S)
        del self.open[replicas]
        await replicas.stop()

    def pool(self, record: BatchRecord, standing: Standing, resolve: Resolve) -> WorkerPool:
        """For one batch; models that its rows named and that are not served any more are left out.

        resolve: what names mean for its key.
        """
        served = [model for model in record.models if model in self._sets]
        return InProcessPool(lambda: _View(self, served, standing, record.tenant, resolve))

    async def start(self, model: str, progress: Progress) -> ReplicaSet:
        """Finds a model's replicas, once for all batches. Raises: Unavailable, EngineStartFailed."""
        if (replicas := self._sets.get(model)) is None:
            raise Unavailable(_REMOVED.format(model))
        self.open[replicas] += 1
        try:
            async with self._starting[model]:
                await replicas.start(progress)
        except ConfigError as error:  # it is of our application, which is still being deployed
            raise Unavailable(str(error)) from error
        finally:
            self.open[replicas] -= 1
        if self._sets.get(model) is not replicas:
            raise Unavailable(_REMOVED.format(model))
        return replicas

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*(one.stop() for one in self._sets.values()))

    def share(self, model: str, view: _View) -> int:
        """Slots of one model for a batch: its share while others wait, else all that are free."""
        if (replicas := self._sets.get(model)) is None:
            return 0
        free = replicas.available_slots(sum(one.claimed_of(model) for one in self.views))
        others = [one for one in self.views if one is not view and one.is_hungry(model)]
        if not others or not free:
            return free
        return share(free, view.claim(model), [one.claim(model) for one in others], time.time())


class _View:
    """The backend of one batch."""

    def __init__(
        self, fleet: Fleet, models: Sequence[str], standing: Standing, tenant: str, resolve: Resolve
    ) -> None:
        self._fleet, self._models, self._standing, self._tenant = fleet, models, standing, tenant
        self._resolve = resolve
        self._sets: dict[str, ReplicaSet] = {}
        self._sending = Counter[str]()
        self._claimed = 0
        self._hungry_at = -math.inf

    async def start(self, progress: Progress = no_progress) -> None:
        self._fleet.views.add(self)  # first: a model may be removed meanwhile
        try:
            await asyncio.gather(*(self._start(model, progress) for model in self._models))
        except BaseException:
            await self.stop()
            raise

    async def _start(self, model: str, progress: Progress = no_progress) -> ReplicaSet:
        found = self._sets[model] = await self._fleet.start(model, progress)
        return found

    async def stop(self) -> None:
        self._fleet.views.discard(self)

    def forget(self, there: Mapping[str, ReplicaSet]) -> None:
        """Keeps only those of its replicas that are still there."""
        self._sets = {model: one for model, one in self._sets.items() if there.get(model) is one}

    async def send(self, request: RowRequest) -> Response:
        try:
            model, adapter = self._resolve(request.model, request.body)
            named = msgspec.structs.replace(request, model=f"{model}:{adapter}" if adapter else model)
            if self._fleet.isolate_cache:
                salt = salted(self._tenant, named.path, own_salt(named.body))
                named = msgspec.structs.replace(named, body=with_fields(named.body, salt))
        except Error as error:
            return Response(error.status, form(request.path).envelope(error))
        # the default model, or an alias, may have been another one when the batch began
        replicas = self._sets.get(model) or await self._start(model)
        self._sending[model] += 1
        self._fleet.open[replicas] += 1
        try:
            return await replicas.send(named)
        finally:
            self._sending[model] -= 1
            self._fleet.open[replicas] -= 1

    def available_slots(self, in_flight: int) -> int:
        self._claimed = in_flight
        if not self._sets:  # each row is answered by what it names
            return max(0, _ROWS_WITHOUT_MODEL - in_flight)
        found = sum(self._fleet.share(model, self) for model in self._sets)
        if not found:
            self._hungry_at = time.monotonic()
        return found

    def claimed_of(self, model: str) -> int:
        """Requests in it, with those that are about to be sent, which may be for any model."""
        if model not in self._sets:
            return 0
        others = sum(self._sending.values()) - self._sending[model]
        return max(self._sending[model], self._claimed - others)

    def claim(self, model: str) -> Claim:
        return Claim(self._standing, self.claimed_of(model))

    def is_hungry(self, model: str) -> bool:
        """Whether it waits for a slot of the model's."""
        return model in self._sets and time.monotonic() - self._hungry_at < _HUNGRY_S
