"""The workers of a job as its driver sees them: how many, how each is made, and how its death is told.

Here is the one in the driver's own process; `actor` has those that are Ray actors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.data.backends.protocol import Backend
from penstock.data.execution.retry import RetryPolicy
from penstock.data.job.protocol import Done, Lease, Step
from penstock.data.job.worker import Worker
from penstock.data.journal.segment import Segment
from penstock.data.storage.paths import StoragePath
from penstock.engine import Progress
from penstock.errors import Unavailable


class WorkerLost(Unavailable):
    """The process of a worker has ended, with what was in it; another one can be made."""

    code = "worker_lost"


class Hand(Protocol):
    """One worker, wherever it runs."""

    async def start(self, progress: Progress) -> None:
        """Raises: WorkerLost; what the backend raises when it cannot start."""
        ...

    async def step(self, leases: list[Lease], hungry: bool) -> Step:
        """See `Worker.step`. Raises: WorkerLost; what made the backend unusable."""
        ...

    async def stop(self) -> list[Done]:
        """See `Worker.stop`. Safe to call of a dead one, and twice."""
        ...


class Crew(Protocol):
    """Makes workers, all of one kind."""

    size: int

    async def open(self) -> None:
        """Makes ready what all workers need. Raises: Unavailable."""
        ...

    def hand(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> Hand:
        """One worker, not started. segment: the name of what it writes into the journal."""
        ...

    async def close(self) -> None: ...


class Alone:
    """One worker in this process, over a backend that is elsewhere."""

    size = 1

    def __init__(self, backend: Callable[[], Backend]) -> None:
        self._backend = backend

    async def open(self) -> None:
        return

    def hand(self, journal: StoragePath, segment: str, retry_policy: RetryPolicy) -> Hand:
        return Worker(self._backend(), partial(Segment, journal, segment), retry_policy, exclusive=False)

    async def close(self) -> None:
        return
