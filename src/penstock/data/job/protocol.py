"""What the driver and its workers say to each other, and the contract of a worker and of a pool of them.

The structs cross process boundaries.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from penstock.data.execution.retry import RetryPolicy
from penstock.data.results.outcome import State
from penstock.data.rows.request import RowRequest
from penstock.data.storage.paths import StoragePath
from penstock.engine import Progress
from penstock.errors import Unavailable


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """A row for one worker to run. deaths: of engines that it was in. key: see `journal.Entry`."""

    row: int
    request: RowRequest
    deaths: int = 0
    key: str | None = None


class RowCompleted(msgspec.Struct, frozen=True, array_like=True):
    """A row that has ended and is in the journal. Units: tokens, as the engine counted them; seconds."""

    row: int
    state: State
    code: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    attempts: int = 1
    deaths: int = 0
    message: str = ""


class WorkerUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A worker's news. room: how many more rows it wants now."""

    done: list[RowCompleted]
    room: int


class WorkerLost(Unavailable):
    """The process of a worker has ended, with what was in it; another one can be made."""

    code = "worker_lost"


class WorkerHandle(Protocol):
    """One worker, wherever it runs."""

    async def start(self, progress: Progress) -> None:
        """Raises: WorkerLost; what the backend raises when it cannot start."""
        ...

    async def step(self, items: list[WorkItem], has_more: bool) -> WorkerUpdate:
        """See `Worker.step`. Raises: WorkerLost; what made the backend unusable."""
        ...

    async def stop(self) -> list[RowCompleted]:
        """See `Worker.stop`. Safe to call of a dead one, and twice."""
        ...


class WorkerPool(Protocol):
    """Makes workers, all of one kind."""

    size: int

    async def open(self) -> None:
        """Makes ready what all workers need. Raises: Unavailable."""
        ...

    def make_worker(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> WorkerHandle:
        """One worker, not started. segment: the name of what it writes into the journal."""
        ...

    async def close(self) -> None: ...
