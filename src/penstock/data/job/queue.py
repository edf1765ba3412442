"""Waiting rows, rows that workers run, and which worker gets which row.

In the driver's process, on its event loop. A thread reads a bounded number of rows ahead; nothing here knows
files, engines or the journal.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator

from penstock.data.job.prefix import PendingRow, PrefixGroups
from penstock.data.job.protocol import RowCompleted, WorkItem
from penstock.data.rows.digest import RowsByKey
from penstock.on_thread import completed

LOOK_AHEAD = 4096
"""Rows read ahead. Rows with a common prefix are grouped among them."""

LOOK_AHEAD_BYTES = 64 << 20
"""Size of the requests read ahead, a second limit: requests with images are large."""

_SAME_AHEAD = 16
"""Limit of rows waiting for an identical one, in multiples of the look-ahead: each takes little memory."""

_READ_ROWS, _READ_BYTES = 512, 8 << 20


class Queue:
    """rows: rows to run, in the order of the input; read on a thread.

    on_reused: called with a row that need not run, and the row of this run whose answer it gets.
    """

    def __init__(
        self,
        rows: Iterator[PendingRow],
        *,
        group: bool = True,
        on_reused: Callable[[int, int], None] = lambda row, of: None,
        look_ahead: int = LOOK_AHEAD,
    ) -> None:
        self._rows, self._on_reused = rows, on_reused
        self._look_ahead = look_ahead
        self._requeued: deque[PendingRow] = deque()  # rows that a worker had before: they go first
        self._groups = PrefixGroups(separate=not group)
        self._running: dict[str, dict[int, PendingRow]] = {}
        self._engine_of: dict[str, str] = {}
        self._identical: dict[str, list[PendingRow]] = {}  # the first runs, the others wait for its answer
        self._answers = RowsByKey()
        self._waiting = self._waiting_bytes = self._waiting_duplicates = 0
        self._read = self._read_all = self._closed = False
        self._changed = asyncio.Event()
        self._need_rows = asyncio.Event()
        self.error: BaseException | None = None

    def register(self, worker: str, engine: str | None = None) -> None:
        """The worker may take rows. engine: shared by a worker and those that replace it after a crash."""
        self._running.setdefault(worker, {})
        self._engine_of[worker] = engine or worker

    def take(self, worker: str, room: int) -> list[WorkItem]:
        """At most `room` rows for `worker` to run."""
        mine = self._running[worker]
        rows: list[PendingRow] = []
        for _ in range(min(room, self._share(worker))):
            if (row := self._next(worker)) is None:
                break
            rows.append(row)
        self._waiting -= len(rows)
        self._waiting_bytes -= _size(rows)
        mine.update((row.number, row) for row in rows)
        if not self._is_full:
            self._need_rows.set()
        return [WorkItem(row.number, row.request, row.deaths, row.key) for row in rows]

    def record_completed(self, worker: str, done: Iterable[RowCompleted]) -> list[RowCompleted]:
        """Those of `done` that `worker` was running; others were completed before, or moved elsewhere."""
        mine = self._running.get(worker, {})
        known: list[RowCompleted] = []
        for one in done:
            row = mine.pop(one.row, None)
            if row is not None:
                known.append(one)
                self._share_answer(row, ok=one.state == "ok")
        self.wake()
        return known

    def requeue_crashed(self, worker: str) -> list[PendingRow]:
        """The worker crashed: its rows wait again, with one more death. Returns them."""
        rows = self.release(worker)
        for row in rows:
            row.deaths += 1
            row.crashed_in = self._engine_of.get(worker)
        return rows

    def release(self, worker: str) -> list[PendingRow]:
        """The worker was stopped: its rows wait again, without a death. Returns them."""
        rows = list(self._running.pop(worker, {}).values())
        self._groups.release(worker)
        self._requeue(rows)
        return rows

    def rows_of(self, worker: str) -> set[int]:
        """Numbers of the rows that `worker` runs."""
        return set(self._running.get(worker, ()))

    def running(self, worker: str) -> int:
        """Number of rows that `worker` runs."""
        return len(self._running.get(worker, {}))

    @property
    def in_progress(self) -> int:
        return sum(map(len, self._running.values()))

    @property
    def waiting(self) -> int:
        """Rows read that no worker runs."""
        return self._waiting

    @property
    def drained(self) -> bool:
        """Whether every row that was read is completed."""
        return self._read and not self._waiting and not self.in_progress

    @property
    def complete(self) -> bool:
        """Whether, besides, the input was read to its end."""
        return self.drained and self._read_all

    async def changed(self) -> None:
        """Returns when rows were added or completed, or after `wake`."""
        self._changed.clear()
        await self._changed.wait()

    async def read_ahead(self) -> None:
        """Reads ahead until the input ends. An exception of the input is stored in `error`."""
        try:
            try:
                while (rows := await completed(asyncio.to_thread(self._read_some))) is not None:
                    self._add(rows)
                    while self._is_full and not self._closed:
                        self._need_rows.clear()
                        await self._need_rows.wait()
                self._read_all = not self._closed
            finally:
                if isinstance(self._rows, Generator):  # closes its files and threads now
                    await completed(asyncio.to_thread(self._rows.close))
        except Exception as error:
            self.error = error
        finally:
            self._read = True
            self.wake()

    @property
    def _is_full(self) -> bool:
        if self._waiting >= self._look_ahead or self._waiting_bytes >= LOOK_AHEAD_BYTES:
            return True
        return self._waiting_duplicates >= _SAME_AHEAD * self._look_ahead

    def close(self) -> None:
        """Stops reading; await `read_ahead` for its end."""
        self._closed = True
        self._need_rows.set()

    def wake(self) -> None:
        """Makes `changed` return."""
        self._changed.set()

    def _read_some(self) -> list[PendingRow] | None:
        """On the reader's thread: the next rows, None after the last one."""
        some: list[PendingRow] = []
        size = 0
        if not self._closed:
            for row in self._rows:
                some.append(row)
                size += _size((row,))
                if len(some) == _READ_ROWS or size >= _READ_BYTES or self._closed:
                    break
        return some or None

    def _add(self, rows: list[PendingRow]) -> None:
        fresh = [row for row in rows if self._is_first(row)]
        self._groups.add(fresh)
        self._waiting += len(fresh)
        self._waiting_bytes += _size(fresh)
        self.wake()

    def _is_first(self, row: PendingRow) -> bool:
        """Whether it must run. If not, it has the answer of an identical row, or waits for it."""
        if row.key is None:
            return True
        if (answer := self._answers.get(row.key)) is not None:
            self._on_reused(row.number, answer)
            return False
        same = self._identical.setdefault(row.key, [])
        same.append(row)
        if row is not same[0]:
            row.request, row.prefix = same[0].request, b""  # frees the memory of an equal copy
            self._waiting_duplicates += 1
        return row is same[0]

    def _share_answer(self, row: PendingRow, *, ok: bool) -> None:
        """Gives an answer to all rows that wait for it; after a failure the next of them runs."""
        if row.key is None or (same := self._identical.get(row.key)) is None or row is not same[0]:
            return
        del same[0]
        if not ok and same:
            self._waiting_duplicates -= 1
            self._requeue(same[:1])
            return
        del self._identical[row.key]
        self._waiting_duplicates -= len(same)
        if not self._is_full:
            self._need_rows.set()
        if ok:
            self._answers.setdefault(row.key, row.number)
            for other in same:
                self._on_reused(other.number, row.number)

    def _requeue(self, rows: list[PendingRow]) -> None:
        self._requeued.extend(rows)
        self._waiting += len(rows)
        self._waiting_bytes += _size(rows)
        self.wake()

    def _share(self, worker: str) -> int:
        """Once the input is read, a fair share of the remaining rows, so that no worker idles while another
        has a backlog.
        """
        if not self._read:
            return self._waiting
        workers = len(self._running)
        fair = math.ceil((self._waiting + self.in_progress) / workers)
        return max(0, fair - len(self._running[worker]))

    def _next(self, worker: str) -> PendingRow | None:
        alone = len(self._running) == 1
        for index, row in enumerate(self._requeued):
            if alone or row.crashed_in != self._engine_of[worker]:
                del self._requeued[index]
                return row
        return self._groups.next(worker)


def _size(rows: Iterable[PendingRow]) -> int:
    """Bytes of the requests."""
    return sum(len(row.request.body) + len(row.request.prompt or b"") for row in rows)
