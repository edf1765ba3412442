"""Rows that wait, rows that workers have, and which row goes to whom.

In the driver's process, on its event loop. A thread reads ahead, a bounded number of rows; nothing here knows
files, engines or the journal.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from penstock.data.job.prefix import Groups, Waiting
from penstock.data.job.protocol import Done, Lease
from penstock.data.rows.request import Request

LOOK_AHEAD = 4096
"""Rows that are read before they are asked for: among so many, those with one beginning are found."""

LOOK_AHEAD_BYTES = 64 << 20
"""Of their requests: pictures stop the reading sooner."""

_SAME_AHEAD = 16
"""Times as many rows that wait for the answer of an identical one: each takes little room."""

_READ_ROWS, _READ_BYTES = 512, 8 << 20


@dataclass(slots=True)
class _Same:
    """Rows with one request: the first runs, the others wait for its answer."""

    first: int
    request: Request
    others: list[Waiting] = field(default_factory=list[Waiting])


@dataclass(slots=True)
class Reused:
    """A row that has the answer of another one."""

    row: int
    of: int


class Queue:
    """rows: those to run, in the order of the input. read on a thread.

    answered: told of rows that need not run, because an identical request has been answered in this run.
    """

    def __init__(
        self,
        rows: Iterator[Waiting],
        *,
        group: bool = True,
        answered: Callable[[list[Reused]], None] = lambda reused: None,
        look_ahead: int = LOOK_AHEAD,
    ) -> None:
        self._rows, self._answered = rows, answered
        self._look_ahead = look_ahead
        self._back: deque[Waiting] = deque()  # rows that a worker had already: they go first
        self._groups = Groups(apart=not group)
        self._leased: dict[str, dict[int, Waiting]] = {}
        self._engines: dict[str, str] = {}
        self._same: dict[str, _Same] = {}
        self._answers: dict[str, int] = {}
        self._waiting = self._waiting_bytes = self._others = 0
        self._read = self._whole = self._closed = False
        self._news = asyncio.Event()
        self._thirst = asyncio.Event()
        self.error: BaseException | None = None

    def join(self, worker: str, engine: str | None = None) -> None:
        """The worker may take rows from now on. engine: the same for all workers that follow one another."""
        self._leased.setdefault(worker, {})
        self._engines[worker] = engine or worker

    def take(self, worker: str, room: int) -> list[Lease]:
        """At most `room` rows that `worker` runs from now on."""
        mine = self._leased[worker]
        rows: list[Waiting] = []
        for _ in range(min(room, self._share(worker))):
            if (row := self._next(worker)) is None:
                break
            rows.append(row)
        self._waiting -= len(rows)
        self._waiting_bytes -= _size(rows)
        mine.update((row.number, row) for row in rows)
        if not self._enough:
            self._thirst.set()
        return [Lease(row.number, row.request, row.deaths, row.key) for row in rows]

    def ended(self, worker: str, done: Iterable[Done]) -> list[Done]:
        """Those of `done` that `worker` had; others ended with it before, or went to somebody else."""
        mine = self._leased.get(worker, {})
        known: list[Done] = []
        for one in done:
            row = mine.pop(one.row, None)
            if row is not None:
                known.append(one)
                self._share_answer(row, ok=one.state == "ok")
        self.wake()
        return known

    def lost(self, worker: str) -> list[Waiting]:
        """The worker has died: its rows wait again, having been in one death more. Gives them."""
        rows = list(self._leased.pop(worker, {}).values())
        self._groups.leave(worker)
        for row in rows:
            row.deaths += 1
            row.lost_by = self._engines.get(worker)
        self._again(rows)
        return rows

    def left(self, worker: str) -> None:
        """The worker was stopped; its rows wait again as if it had never had them."""
        rows = list(self._leased.pop(worker, {}).values())
        self._groups.leave(worker)
        self._again(rows)

    def rows_of(self, worker: str) -> set[int]:
        """Numbers of the rows that `worker` has."""
        return set(self._leased.get(worker, ()))

    def running(self, worker: str) -> int:
        """Rows that `worker` has."""
        return len(self._leased.get(worker, {}))

    @property
    def leased(self) -> int:
        return sum(map(len, self._leased.values()))

    @property
    def waiting(self) -> int:
        """Rows that are read and that no worker has."""
        return self._waiting

    @property
    def over(self) -> bool:
        """Whether every row has ended."""
        return self._read and not self._waiting and not self.leased

    @property
    def complete(self) -> bool:
        """The same, and the input was read to its end."""
        return self.over and self._whole

    async def changed(self) -> None:
        """Returns when rows have come, or have ended."""
        self._news.clear()
        await self._news.wait()

    async def fill(self) -> None:
        """Reads ahead until the input ends; what reading raises is `error` then."""
        try:
            while (rows := await asyncio.to_thread(self._some)) is not None:
                self._add(rows)
                while self._enough and not self._closed:
                    self._thirst.clear()
                    await self._thirst.wait()
            self._whole = not self._closed
        except Exception as error:
            self.error = error
        finally:
            self._read = True
            self.wake()

    @property
    def _enough(self) -> bool:
        if self._waiting >= self._look_ahead or self._waiting_bytes >= LOOK_AHEAD_BYTES:
            return True
        return self._others >= _SAME_AHEAD * self._look_ahead

    def close(self) -> None:
        """Reading ends soon; await `fill` to know when."""
        self._closed = True
        self._thirst.set()

    def wake(self) -> None:
        """Lets `changed` return."""
        self._news.set()

    def _some(self) -> list[Waiting] | None:
        """On the reader's thread: the next rows, None after the last one."""
        some: list[Waiting] = []
        size = 0
        if not self._closed:
            for row in self._rows:
                some.append(row)
                size += _size((row,))
                if len(some) == _READ_ROWS or size >= _READ_BYTES or self._closed:
                    break
        return some or None

    def _add(self, rows: list[Waiting]) -> None:
        fresh = [row for row in rows if self._is_first(row)]
        self._groups.add(fresh)
        self._waiting += len(fresh)
        self._waiting_bytes += _size(fresh)
        self.wake()

    def _is_first(self, row: Waiting) -> bool:
        """Whether it must run. If not, its answer is there, or will be when the first one's is."""
        if row.key is None:
            return True
        if (answer := self._answers.get(row.key)) is not None:
            self._answered([Reused(row.number, answer)])
            return False
        same = self._same.setdefault(row.key, _Same(row.number, row.request))
        if same.first != row.number:
            row.request, row.begin = same.request, b""  # its own, once more, would only take room
            same.others.append(row)
            self._others += 1
        return same.first == row.number

    def _share_answer(self, row: Waiting, *, ok: bool) -> None:
        """An answer is for all that wait for it; after a failure the next one tries by itself."""
        if row.key is None or (same := self._same.get(row.key)) is None or same.first != row.number:
            return
        if not ok and same.others:
            first = same.others.pop(0)
            self._others -= 1
            same.first = first.number
            self._again([first])
            return
        del self._same[row.key]
        self._others -= len(same.others)
        if not self._enough:
            self._thirst.set()
        if ok:
            self._answers[row.key] = same.first
            if same.others:
                self._answered([Reused(other.number, same.first) for other in same.others])

    def _again(self, rows: list[Waiting]) -> None:
        self._back.extend(rows)
        self._waiting += len(rows)
        self._waiting_bytes += _size(rows)
        self.wake()

    def _share(self, worker: str) -> int:
        """At the end of the input no worker takes what another one could run at once."""
        if not self._read:
            return self._waiting
        workers = len(self._leased)
        fair = math.ceil((self._waiting + self.leased) / workers)
        return max(0, fair - len(self._leased[worker]))

    def _next(self, worker: str) -> Waiting | None:
        alone = len(self._leased) == 1
        for index, row in enumerate(self._back):
            if alone or row.lost_by != self._engines[worker]:
                del self._back[index]
                return row
        return self._groups.next(worker)


def _size(rows: Iterable[Waiting]) -> int:
    """Bytes of their requests."""
    return sum(len(row.request.body) + len(row.request.prompt or b"") for row in rows)
