"""Runs the batch in real time: one task steps all requests and delivers each token when it is due."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from penstock.engine import Delta
from penstock.engine_control import PauseMode
from penstock.engines.sim.batch import Batch
from penstock.engines.sim.batch import Sequence as Output
from penstock.engines.sim.cache import Chain
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.errors import Conflict, EngineDead, Error
from penstock.request_context import ChoiceTokens, report_timings, start_tag, tier
from penstock.tiers import ENGINE_PRIORITY


class Clock:
    """Seconds of real time."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep_until(self, due: float) -> None:
        """Returns at `due` or later, never earlier; lets others run even when `due` has passed."""
        await asyncio.sleep(max(0.0, due - self.now()))
        while (left := due - self.now()) > 0:  # noqa: ASYNC110 - timers may ring a millisecond early
            await asyncio.sleep(left)


class Scheduler:
    """The engine's loop. When it is late, the batch's clock stays on the model's time, and it catches up."""

    def __init__(self, options: SimOptions, after_step: Callable[[], None], clock: Clock | None) -> None:
        self._after_step = after_step
        self._clock = clock or Clock()
        self._block_size = options.block_size
        self.batch = Batch(options)
        self._arrived = asyncio.Event()
        self._frozen = False
        self._quiet = asyncio.Event()  # set while no step is running
        self._quiet.set()
        self._streams: dict[Output, asyncio.Queue[Delta | Error]] = {}

    async def run(self) -> None:
        """Runs steps for ever."""
        while True:
            while self._frozen or self.batch.idle():  # also when a request has left before we woke
                self._quiet.set()
                self._arrived.clear()
                await self._arrived.wait()
            self._quiet.clear()
            await self._clock.sleep_until(self.batch.begin_step())
            for output in self.batch.end_step():
                self._deliver(output)
            self._after_step()

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no more tokens are made; new requests wait."""
        self.batch.admits = False
        self._frozen = mode == "keep"
        if mode == "abort":
            for output, deltas in tuple(self._streams.items()):
                self._forget(output)
                counts = output.prompt_tokens, output.cached_tokens
                deltas.put_nowait(Delta("", (), output.index, "abort", *counts))
        if not (self._frozen or self.batch.idle()):  # what an earlier pause has held is to finish
            self._quiet.clear()
            self._arrived.set()
        await self._quiet.wait()

    def freeze(self) -> None:
        """Holds what runs, after a pause that was not completed."""
        self._frozen = True

    def resume(self) -> None:
        self.batch.admits, self._frozen = True, False
        self._arrived.set()

    def forget(self) -> None:
        """Empties the prefix cache. Raises: Conflict while requests use it."""
        if self.batch.running:
            raise Conflict(
                f"{self.batch.running} requests use the cache. Pause with mode 'wait' or 'abort' before."
            )
        self.batch.forget()

    async def stream(
        self,
        asked: Sequence[tuple[Sequence[int], PlannedReply]],
        adapter: str | None = None,
        before: Sequence[ChoiceTokens] = (),
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one request when they are due, with an output per prompt and reply; closing it frees its
        slots. before: of the same request elsewhere; these come first, and are computed with the prompt.
        """
        deltas: asyncio.Queue[Delta | Error] = asyncio.Queue()
        arrival, priority = self._clock.now(), ENGINE_PRIORITY[tier.get()] + start_tag.get()
        outputs = [
            Output(
                len(prompt), reply, Chain(prompt, reply, self._block_size, adapter), arrival, index, priority
            )
            for index, (prompt, reply) in enumerate(asked)
        ]
        for one in before:
            output = outputs[one.choice]
            output.made += 1
            output.preempted = True  # what was cached is known
            output.cached_tokens = next(iter(one.cached_tokens), output.cached_tokens)
            deltas.put_nowait(_delta(output))
        for output in outputs:
            if output.made < output.reply.tokens:
                self._streams[output] = deltas
                self.batch.submit(output)
        report_timings(outputs[0].spent)
        self._arrived.set()
        unfinished = len(outputs)
        try:
            while unfinished:
                delta = await deltas.get()
                if isinstance(delta, Error):
                    raise delta
                unfinished -= delta.finish_reason is not None
                yield delta
        finally:
            for output in outputs:
                self._forget(output)

    def fail(self, reason: str) -> None:
        """Ends every stream with EngineDead."""
        for output, deltas in tuple(self._streams.items()):
            self._forget(output)
            deltas.put_nowait(EngineDead(reason))

    def _forget(self, output: Output) -> None:
        with contextlib.suppress(KeyError):
            del self._streams[output]
            self.batch.remove(output)

    def _deliver(self, output: Output) -> None:
        delta = _delta(output)
        self._streams[output].put_nowait(delta)
        self.batch.counts.made_tokens += len(delta.token_ids)
        if output.made == 1:
            self.batch.counts.prompt_tokens += output.prompt_tokens
        if delta.finish_reason:
            self.batch.counts.finished += 1
            del self._streams[output]


def _delta(output: Output) -> Delta:
    """Of the token that it made last."""
    reply = output.reply
    at = (output.made - 1) % (len(reply.token_ids) or 1)
    finish = reply.finish_reason if output.made == reply.tokens else None
    counts = output.prompt_tokens, output.cached_tokens
    text, token_ids = "".join(reply.pieces[at : at + 1]), tuple(reply.token_ids[at : at + 1])
    return Delta(text, token_ids, output.index, finish, *counts)
