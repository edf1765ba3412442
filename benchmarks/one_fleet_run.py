"""One engine with online requests and batch, in virtual time: the simulator's batch, the replica's own share.

`one_fleet` compares such runs. Online requests come at random, by a rate that may change: the same ones in
all runs of a seed. Batch always has more rows.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.engine import Load
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.serve.replica.tiers.controller import TICK_S, Targets
from penstock.serve.replica.tiers.share import BatchRequest, BatchShare

ENGINE: dict[str, object] = {
    "max_model_len": 32_768,
    "kv_tokens": 400_000,
    "prefill_tokens_per_s": 25_000,
    "prefill_per_kv_token_ns": 1.3,
    "step_base_ms": 7,
    "step_per_request_ms": 0.03,
    "step_per_kv_token_ns": 50,
    "enable_prefix_caching": False,
}
FULL_PER_S = 30.0
"""Online requests per second that this engine serves at its TTFT's knee: 100 % of load."""
ONLINE = (300, 200)  # tokens of the prompt and the answer, in the mean
ROW = (300, 200)
WINDOW_S = 5.0
WANTED = 512  # rows that wait or run at all times

Rate = Callable[[float], float]
"""Online requests per second at a time, in seconds."""


class Fixed(BatchShare):
    """A static limit, instead of the controller's."""

    def __init__(self, load: Callable[[], Load], clock: Callable[[], float], limit: int) -> None:
        super().__init__(load, Targets(), clock)
        self._most = limit

    @property
    def limit(self) -> int:
        return self._most

    def tick(self) -> None:
        self._start()

    def online_began(self) -> None:
        self._online = 0


class _NoBlocks:
    def __getitem__(self, index: int, /) -> int:
        return index


@dataclass(slots=True)
class Seen:
    """What one run showed. Units: seconds.

    ttft_s, itl_s: by the window in which they ended. firsts: each first token's arrival and TTFT. ticks: of
    the controller, each with its time, the limit of batch and the engine's p99 of steps.
    """

    ttft_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    itl_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    batch_tokens: int = 0
    requeued: int = 0
    firsts: list[tuple[float, float]] = field(default_factory=list)
    ticks: list[tuple[float, int, float]] = field(default_factory=list)


class Run:
    """One engine, one kind of control, `seconds` of virtual time after a start of `warm_s`."""

    def __init__(self, online_per_s: Rate, control: str, targets: Targets, seed: int, rows: bool) -> None:
        """control: "controlled", or a static limit."""
        options = SimOptions.model_validate(ENGINE)
        self._batch = Batch(options)
        self._dice = {kind: random.Random(f"{seed} {kind}") for kind in ("arrivals", "online", "rows")}
        self._rate = online_per_s
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = itertools.count()
        self._stepping = False
        self._online: set[Sequence] = set()
        self._rows: dict[Sequence, BatchRequest] = {}
        self._last: dict[Sequence, float] = {}
        self._share: BatchShare = (
            BatchShare(self._batch.load, targets, lambda: self._now)
            if control == "controlled"
            else Fixed(self._batch.load, lambda: self._now, int(control))
        )
        self.seen = Seen()
        self._measures = False
        self._at(0.0, self._tick)
        self._next_online()
        for _ in range(WANTED if rows else 0):
            self._at(0.0, self._row)

    def go(self, warm_s: float, seconds: float) -> Seen:
        for until in (warm_s, warm_s + seconds):
            self._measures = until > warm_s
            while self._events and self._events[0][0] < until:
                self._now, _, act, arguments = heapq.heappop(self._events)
                act(*arguments)
        self.seen.requeued = self._share.requeued
        return self.seen

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), act, arguments))

    def _next_online(self) -> None:
        rate = self._rate(self._now)
        if rate:
            self._at(self._now + self._dice["arrivals"].expovariate(rate), self._ask)
        else:
            self._at(self._now + 0.05, self._next_online)

    def _ask(self) -> None:
        request = self._made(self._sizes(ONLINE, "online"), 0)
        self._online.add(request)
        self._share.online_began()
        self._submit(request)
        self._next_online()

    def _row(self) -> None:
        self._enter(self._sizes(ROW, "rows"), False)

    def _enter(self, sizes: tuple[int, int], again: bool) -> None:
        turn = BatchRequest(lambda: self._run_row(turn, sizes))
        self._share.enter(turn, again)

    def _run_row(self, turn: BatchRequest, sizes: tuple[int, int]) -> None:
        row = self._made(sizes, 1)
        self._rows[row] = turn
        turn.abort = lambda: self._abort(row, sizes)
        self._submit(row)

    def _abort(self, row: Sequence, sizes: tuple[int, int]) -> bool:
        del self._rows[row]
        self._batch.remove(row)
        if self._measures:
            self.seen.batch_tokens -= row.made
        self._at(self._now, self._enter, sizes, True)
        return True

    def _sizes(self, means: tuple[int, int], kind: str) -> tuple[int, int]:
        prompt, answer = (max(2, int(self._dice[kind].uniform(0.5, 1.5) * mean)) for mean in means)
        return prompt, answer

    def _made(self, sizes: tuple[int, int], priority: int) -> Sequence:
        reply = PlannedReply((), (), sizes[1], "length")
        return Sequence(sizes[0], reply, _NoBlocks(), self._now, priority=priority)

    def _submit(self, request: Sequence) -> None:
        self._batch.submit(request)
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        self._stepping = not self._batch.idle()
        if self._stepping:
            self._at(self._batch.begin_step(), self._end_step)

    def _end_step(self) -> None:
        for request in self._batch.end_step():
            if request in self._online:
                self._online_token(request)
            elif request in self._rows:
                self._row_token(request)
        self._step()

    def _online_token(self, request: Sequence) -> None:
        window = int(self._now / WINDOW_S)
        if request.made == 1:
            self._share.first_token(self._now - request.arrival)
            if self._measures:
                self.seen.ttft_s[window].append(self._now - request.arrival)
                self.seen.firsts.append((request.arrival, self._now - request.arrival))
        elif self._measures:
            self.seen.itl_s[window].append(self._now - self._last[request])
        self._last[request] = self._now
        if request.made == request.reply.tokens:
            self._online.discard(request)
            del self._last[request]
            self._share.online_ended()

    def _row_token(self, row: Sequence) -> None:
        self.seen.batch_tokens += self._measures
        if row.made == row.reply.tokens:
            self._share.leave(self._rows.pop(row))
            self._row()

    def _tick(self) -> None:
        self._share.tick()
        if self._measures:
            self.seen.ticks.append((self._now, self._share.limit, self._batch.load().step_s))
        self._at(self._now + TICK_S, self._tick)
