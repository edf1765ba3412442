"""One level in one worker: begins conversations when the load says so, and records what became of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass

from penstock.bench.load.arrivals import WARMING, Level, arrivals
from penstock.bench.load.client import Client, NotHTTP, Unreachable
from penstock.bench.load.conversations import Request, RequestWriter, Workload
from penstock.bench.load.outcome import UNFINISHED, RequestOutcome
from penstock.bench.load.stream import Stream, Usage
from penstock.bench.load.target import Target

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a worker knows from the beginning. It does share `index` of `shares` of every level."""

    target: Target
    work: Workload
    timeout_s: float
    think_s: float = 0.0
    index: int = 0
    shares: int = 1


class LevelRun:
    """A level that starts at `start`, in seconds of the monotonic clock.

    outcomes: of all requests that have ended, until somebody takes them away.
    """

    def __init__(
        self, plan: LoadPlan, writer: RequestWriter, client: Client, level: Level, start: float
    ) -> None:
        self.outcomes: list[RequestOutcome] = []
        self.open = 0
        self._plan, self._writer, self._client = plan, writer, client
        self._head = plan.target.head("POST", plan.work.form.path)
        self._level, self._start = level, start
        self._measured_from = start + level.warmup_s
        self._until = None if level.limit_s is None else start + level.limit_s
        self._begun = [0, 0]  # conversations of this share: of the warm-up, and counted ones
        self._tasks: set[asyncio.Task[object]] = set()

    async def run(self) -> None:
        """From the start until the last answer has ended."""
        streams = self._level.concurrency
        if streams is None:
            self._spawn(self._arrive())
        else:
            mine = range(self._plan.index, streams, self._plan.shares)
            for number in mine:
                self._spawn(self._stream(number, streams, mine))
        while self._tasks:
            await asyncio.wait(self._tasks)

    def stop(self) -> None:
        """Hangs up on everything."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[None, None, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- closed: each stream waits for its answer

    async def _stream(self, number: int, streams: int, mine: range) -> None:
        """One user. Users come one after the other in the first half of the warm-up, not all at once."""
        await _sleep_until(self._start + self._level.warmup_s / 2 * number / streams)
        wait_s = _FIRST_WAIT_S
        while (next_ := self._next(streams, mine)) is not None:
            if await self._converse(*next_):
                wait_s = _FIRST_WAIT_S
            else:
                await asyncio.sleep(wait_s)  # or a service that refuses would be asked without pause
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _next(self, streams: int, mine: range) -> tuple[int, bool] | None:
        """The number of the next conversation and whether it counts; None when there is no more.

        Of every `streams` conversations a share has as many as it has streams; whichever is free takes one.
        """
        now = time.monotonic()
        if self._until is not None and now >= self._until:
            return None
        counted = now >= self._measured_from
        wave, place = divmod(self._begun[counted], len(mine))
        index = wave * streams + mine[place]
        if counted and self._level.conversations is not None and index >= self._level.conversations:
            return None
        self._begun[counted] += 1
        return (index if counted else WARMING + index), counted

    # -- open: no answer moves the next request

    async def _arrive(self) -> None:
        for number, begin in enumerate(arrivals(self._level, self._plan.work.seed, self._plan.work.trace)):
            if number % self._plan.shares == self._plan.index:
                due = self._start + begin.at_s
                await _sleep_until(due)
                self._spawn(self._converse(begin.index, begin.counted, due))

    # -- both

    async def _converse(self, index: int, counted: bool, due: float | None = None) -> bool:
        """One conversation up to its end or first failure; whether all was well."""
        conversation = self._writer.conversation(index, self._level.number)
        request, turn = next(conversation), 0
        while True:
            outcome, answer = await self._ask(request, turn, counted, due)
            if not outcome.good:
                return False
            try:
                request, turn = conversation.send(answer), turn + 1
            except StopIteration:
                return True
            due = outcome.ended + self._plan.think_s
            await _sleep_until(due)
            if self._until is not None and time.monotonic() >= self._until:
                return True

    async def _ask(
        self, request: Request, turn: int, counted: bool, due: float | None
    ) -> tuple[RequestOutcome, str]:
        stream, sent = Stream(keep_text=self._plan.work.turns > 1), time.monotonic()
        error, detail = UNFINISHED, ""
        self.open += 1
        try:
            error, detail = await self._answer(request, stream)
        finally:  # cancelled, too
            self.open -= 1
            usage = stream.usage or Usage()
            due = sent if due is None else due
            outcome = RequestOutcome(
                due=due,
                sent=sent,
                ended=stream.ended_at or time.monotonic(),
                events=stream.times.tobytes(),
                asked_tokens=request.asked_tokens,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens,
                turn=turn,
                counted=counted or (self._level.conversations is None and due >= self._measured_from),
                error=error,
                detail=detail,
            )
            self.outcomes.append(outcome)
        return outcome, stream.text

    async def _answer(self, request: Request, stream: Stream) -> tuple[str, str]:
        """Reads the whole answer; the kind of failure, if any, and what is known about it."""
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._client.ask(self._head, request.body, stream)
        except TimeoutError:
            return "timeout", f"not complete after {self._plan.timeout_s:g} s"
        except Unreachable as error:
            return str(error), str(error.__cause__)
        except NotHTTP as error:
            return "not HTTP", str(error)
        except ConnectionError as error:
            return ("cut" if stream.status else "no answer"), str(error)
        return stream.error(), stream.detail


async def _sleep_until(at: float) -> None:
    while (left := at - time.monotonic()) > 0:  # noqa: ASYNC110 - timers may ring a millisecond early
        await asyncio.sleep(left)
