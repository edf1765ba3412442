"""What control of batch is worth: `python -m benchmarks.one_fleet`, online and batch on one simulated engine.

Virtual time: the simulator's batch, the replica's own share and controller, requests that come at random. The
engine is the H100-like one of docs/serve/simulator.md. Online alone first, which sets the targets; then with
batch that always has more rows: without a limit, with static ones, controlled.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.engine import Load
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.serve.replica.tiers.controller import TICK_S, Targets
from penstock.serve.replica.tiers.share import BatchRequest, BatchShare

ENGINE = {
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
STATIC = (4, 16, 64)
WANTED = 512  # rows that wait or run at all times


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
    """What one run showed. Gaps and first tokens by the window in which they ended. Units: seconds."""

    ttft_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    itl_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    batch_tokens: int = 0
    requeued: int = 0
    limits: list[tuple[float, int, int]] = field(default_factory=list)


class Run:
    """One engine, one kind of control, `seconds` of virtual time after a start of `warm_s`."""

    def __init__(
        self, online_per_s: Callable[[float], float], control: str, targets: Targets, seed: int, rows: bool
    ) -> None:
        options = SimOptions.model_validate(ENGINE)
        self._batch = Batch(options)
        self._dice = random.Random(seed)
        self._rate = online_per_s
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = itertools.count()
        self._stepping = False
        self._online: set[Sequence] = set()
        self._rows: dict[Sequence, BatchRequest] = {}
        self._last: dict[Sequence, float] = {}
        self._lost_tokens = 0
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
            self._at(self._now + self._dice.expovariate(rate), self._ask)
        else:
            self._at(self._now + 0.05, self._next_online)

    def _ask(self) -> None:
        request = self._sequence(ONLINE, 0)
        self._online.add(request)
        self._share.online_began()
        self._submit(request)
        self._next_online()

    def _row(self) -> None:
        self._enter(self._sizes(ROW), False)

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
            self._lost_tokens += row.made
            self.seen.batch_tokens -= row.made
        self._at(self._now, self._enter, sizes, True)
        return True

    def _sequence(self, means: tuple[int, int], priority: int) -> Sequence:
        return self._made(self._sizes(means), priority)

    def _sizes(self, means: tuple[int, int]) -> tuple[int, int]:
        prompt, answer = (max(2, int(self._dice.uniform(0.5, 1.5) * mean)) for mean in means)
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
            self.seen.limits.append((self._now, self._share.limit, len(self._online)))
        self._at(self._now + TICK_S, self._tick)


def quantile(values: list[float], share: float) -> float:
    """Of unsorted values; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def every(windows: dict[int, list[float]]) -> list[float]:
    """The values of all windows."""
    return [value for values in windows.values() for value in values]


def kept(seen: Seen, targets: Targets) -> float:
    """Share of the windows whose p99 are within the targets."""
    windows = set(seen.ttft_s) | set(seen.itl_s)
    good = [
        window
        for window in windows
        if quantile(seen.ttft_s[window], 0.99) <= (targets.ttft_s or 0)
        and quantile(seen.itl_s[window], 0.99) <= (targets.itl_s or 0)
    ]
    return len(good) / len(windows) if windows else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.1, 0.3, 0.7])
    parser.add_argument("--controls", nargs="*", default=["512", *map(str, STATIC), "controlled"])
    parser.add_argument("--factor", type=float, default=1.5, help="targets: times online's own p99")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json")
    given = parser.parse_args()
    found = []
    print(
        "| load | control | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | windows kept | batch tok/s | requeued |"
    )
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|")
    for load in given.loads:
        for seed in range(given.seeds):
            rate = load * FULL_PER_S
            alone = Run(lambda _, rate=rate: rate, "0", Targets(), seed, False).go(10, given.seconds)
            targets = Targets(
                given.factor * quantile(every(alone.ttft_s), 0.99),
                given.factor * quantile(every(alone.itl_s), 0.99),
            )
            if not load:
                targets = Targets()
            found.append(line(load, "alone", alone, targets, given.seconds))
            for control in given.controls:
                run = Run(lambda _, rate=rate: rate, control, replace(targets), seed, True)
                found.append(line(load, control, run.go(10, given.seconds), targets, given.seconds))
    if given.json:
        with open(given.json, "w") as file:
            json.dump(found, file)


def line(load: float, control: str, seen: Seen, targets: Targets, seconds: float) -> dict[str, object]:
    ttft, itl = every(seen.ttft_s), every(seen.itl_s)
    figures = {
        "load": load,
        "control": "no limit" if control == "512" else control,
        "ttft_p50_ms": quantile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": quantile(ttft, 0.99) * 1e3,
        "itl_p50_ms": quantile(itl, 0.5) * 1e3,
        "itl_p99_ms": quantile(itl, 0.99) * 1e3,
        "kept": kept(seen, targets),
        "batch_tok_s": seen.batch_tokens / seconds,
        "requeued": seen.requeued,
    }
    print(
        f"| {load:.0%} | {figures['control']} | {figures['ttft_p50_ms']:.0f} "
        f"| {figures['ttft_p99_ms']:.0f} | {figures['itl_p50_ms']:.1f} | {figures['itl_p99_ms']:.1f} "
        f"| {figures['kept']:.0%} | {figures['batch_tok_s']:.0f} | {figures['requeued']} |",
        flush=True,
    )
    return figures


if __name__ == "__main__":
    main()
