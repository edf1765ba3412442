"""What the driver and its workers say to each other, and the contract of a worker and of a pool of them.

The structs cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from penstock.data.execution.retry import RetryPolicy
from penstock.data.results.outcome import State
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import StoragePath
from penstock.engine import Progress
from penstock.errors import Unavailable


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """A row to run. deaths: of engines while they ran it. key: see `Entry`."""

    row: int
    request: RowRequest
    deaths: int = 0
    key: str | None = None


class RowCompleted(msgspec.Struct, frozen=True, array_like=True):
    """A row that is in the journal. Units: tokens, as the engine counted them."""

    row: int
    state: State
    code: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 1


class WorkerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Returned by a worker. room: how many more rows it wants now."""

    done: list[RowCompleted]
    room: int


class WorkerLost(Unavailable):
    """The process of a worker has crashed; another can be started."""

    code = "worker_lost"


class WorkerHandle(Protocol):
    """One worker, in this process or another."""

    async def start(self, progress: Progress) -> None:
        """Raises: WorkerLost; what the backend raises when it cannot start."""
        ...

    async def step(self, items: list[WorkItem], has_more: bool) -> WorkerUpdate:
        """See `BatchWorker.step`. Raises: WorkerLost; what made the backend unusable."""
        ...

    async def stop(self) -> list[RowCompleted]:
        """See `BatchWorker.stop`. May be called after a crash, and twice."""
        ...


class WorkerPool(Protocol):
    """Makes workers of one kind."""

    size: int

    def connect(self) -> Callable[[], None]:
        """Prepares what all workers need; returns what ends it. Raises: Unavailable."""
        ...

    def make_worker(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> WorkerHandle:
        """A worker, not started. segment: the name of its segment of the journal."""
        ...
