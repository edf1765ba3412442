"""Files and batches of one storage: loaded, run and swept by the one process that holds its lock.

A second process over the same storage waits for the lock, and takes over when the first one ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Self

from penstock.config.schema.jobs import JobsConfig
from penstock.data.journal.lock import JobLock, OutputLocked
from penstock.data.storage.paths import StoragePath
from penstock.errors import Error, Unavailable
from penstock.jobs.batches import BatchStore
from penstock.jobs.files import FileStore
from penstock.jobs.owner import Owner
from penstock.jobs.records import BatchRecord
from penstock.jobs.runner import BatchContext, Count, MakePool, RunningBatch
from penstock.jobs.storage import JobStorage
from penstock.jobs.turns import TurnQueue
from penstock.jobs.validation import CheckedInput, OwnEndpoints, Resolve, check_input
from penstock.on_thread import completed, opened

log = logging.getLogger(__name__)

_RETRY_S = 0.5
_LOOK_S = 1.0
_SWEEP_S = 60.0
_RUNNING = 4
"""Batches at a time. Each holds up to 64 MiB of requests that it has read ahead."""


class JobService:
    """Call `start` on the loop that serves the app; `close` at the end."""

    def __init__(
        self,
        config: JobsConfig,
        url: str,
        resolve: Resolve,
        make_pool: MakePool,
        *,
        line_bytes: int = 64 << 20,
        own_endpoints: OwnEndpoints | None = None,
        resolve_only: Callable[[Sequence[str]], Resolve] | None = None,
        count: Count | None = None,
    ) -> None:
        """url: of the storage. line_bytes: limit of a request. own_endpoints: beyond `ENDPOINTS`.
        resolve_only: as `resolve`, for keys that may use some models only. count: what batches took.

        Raises: Unavailable for a URL without a client.
        """
        self.own_endpoints, self.line_bytes = own_endpoints or {}, line_bytes
        self.storage = JobStorage(url)
        self.files = FileStore(config, self.storage)
        self.batches = BatchStore(config, self.storage, self.files, lambda: self.own_endpoints)
        self.turns = TurnQueue(_RUNNING)

        def resolver(record: BatchRecord) -> Resolve:
            if record.may_name is not None and resolve_only is not None:
                return resolve_only(record.may_name)
            return resolve

        def check(at: StoragePath, record: BatchRecord) -> CheckedInput:
            having = self.own_endpoints.get(record.endpoint)
            return check_input(at, record.endpoint, resolver(record), config, self.line_bytes, having)

        self._context = BatchContext(
            self.storage,
            self.files,
            self.batches,
            make_pool,
            resolver,
            check,
            self.turns,
            asyncio.Semaphore(1),
            count,
        )
        self._runs: dict[str, tuple[RunningBatch, asyncio.Task[None]]] = {}
        self._owns = False
        self._ready = asyncio.Event()
        self._owning: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Returns at once; until storage is loaded, clients are asked to come again."""
        self._owning = asyncio.create_task(self._own())

    async def close(self) -> None:
        """Stops batches where they are; the next process goes on."""
        if self._owning is not None:
            self._owning.cancel()
            await asyncio.wait({self._owning})

    def ready(self) -> Self:
        """Itself, when it may be used. Raises: Unavailable."""
        if not self._owns:
            raise Unavailable(
                "Files and batches are not ready: another process holds their storage, or it cannot be "
                "reached. Try again in a moment.",
                retry_after_s=1,
            )
        return self

    async def create_batch(self, content: bytes, owner: Owner | None = None) -> BatchRecord:
        """Raises: as `BatchStore.create`."""
        return await completed(self._create(content, owner))  # one that is stored runs

    async def _create(self, content: bytes, owner: Owner | None) -> BatchRecord:
        record = await self.batches.create(content, owner)
        if self._owns:  # else the next owner has found it
            self._run(record)
        return record

    async def cancel_batch(self, batch_id: str, owner: Owner | None = None) -> BatchRecord:
        """Raises: as `BatchStore.cancel`."""
        record = await self.batches.cancel(batch_id, owner)
        if batch_id in self._runs:
            self._runs[batch_id][0].stop("cancelled")
        return record

    async def wait_ready(self) -> None:
        """Returns when storage is loaded."""
        await self._ready.wait()

    async def wait_idle(self) -> None:
        """Returns when storage is loaded and no batch is unfinished."""
        await self._ready.wait()
        while self._runs:
            self._changed.clear()
            await self._changed.wait()

    def _run(self, record: BatchRecord) -> None:
        run = RunningBatch(record.id, self._context)
        task = asyncio.create_task(run.run())
        self._runs[record.id] = run, task
        self._changed.set()
        task.add_done_callback(lambda done: self._ended(record.id))

    def _ended(self, batch_id: str) -> None:
        self._runs.pop(batch_id, None)
        self._changed.set()

    async def _own(self) -> None:
        waits = False
        while True:
            try:
                async with opened(self.storage.lock, lambda lock: lock.release()) as lock:
                    waits = False
                    await self._serve(lock)
            except Exception as error:
                if not waits or not isinstance(error, OutputLocked):
                    trace = None if isinstance(error, Error) else error
                    log.warning(
                        "The storage of files and batches cannot be used for now: %s", error, exc_info=trace
                    )
                waits = isinstance(error, OutputLocked)
                await asyncio.sleep(_RETRY_S)

    async def _serve(self, lock: JobLock) -> None:
        """Returns when another process has taken over."""
        try:
            await completed(asyncio.to_thread(self.files.load))  # they remove what is unfinished, so not
            await completed(asyncio.to_thread(self.batches.load))  # when the lock is another process's
            for record in self.batches.unfinished():
                self._run(record)
            self._owns = True
            self._ready.set()
            await self._hold(lock)
        finally:
            self._owns = False
            await self._stop_runs()

    async def _hold(self, lock: JobLock) -> None:
        """Until another process has taken over."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            while not lock.lost():
                self.turns.look()
                await asyncio.sleep(_LOOK_S)
        finally:
            sweeping.cancel()
            await asyncio.wait({sweeping})

    async def _sweep(self) -> None:
        while True:
            try:
                await self.files.remove_expired()
                await self.batches.remove_expired()
            except Exception as error:
                log.warning("Expired files and batches could not be removed: %s", error)
            await asyncio.sleep(_SWEEP_S)

    async def _stop_runs(self) -> None:
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
