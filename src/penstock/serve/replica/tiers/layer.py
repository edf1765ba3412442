"""ASGI before the engine's app and its layers: online requests pass, batch requests wait for their turn.

All work of a replica meets here, HTTP and calls by handle alike. A batch request that is aborted before its
response has begun runs again from its body and the tokens that it had; its client notices nothing but the
time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager

from penstock import asgi
from penstock.asgi import ASGIApp, Message, Receive, Scope, Send
from penstock.request_context import TokensProbe, record_tokens, tier, tokens_before, tokens_so_far
from penstock.serve.replica.tiers.controller import TICK_S
from penstock.serve.replica.tiers.share import BatchRequest, BatchShare
from penstock.tiers import FLEX


class Turns:
    """Lets batch take its turns in the share, on the running event loop."""

    def __init__(self, share: BatchShare) -> None:
        self.share = share
        self._ticking: asyncio.Task[None] | None = None

    @contextmanager
    def online(self) -> Generator[None]:
        """Around an online request."""
        self.share.online_began()
        try:
            yield
        finally:
            self.share.online_ended()

    @asynccontextmanager
    async def batch(self, again: bool = False) -> AsyncGenerator[BatchRequest]:
        """Around a batch request: waits until it may run."""
        started = asyncio.Event()
        request = BatchRequest(started.set)
        self.share.enter(request, again)
        if self._ticking is None or self._ticking.done():
            self._ticking = asyncio.create_task(self._tick())
        try:
            await started.wait()
            yield request
        finally:
            self.share.leave(request)

    async def _tick(self) -> None:
        while not self.share.idle:
            self.share.tick()
            await asyncio.sleep(TICK_S)


class ByClass:
    """ASGI around `app`. weights: the version that the engine has now."""

    def __init__(self, app: ASGIApp, turns: Turns, weights: Callable[[], str] = lambda: "") -> None:
        self._app = app
        self._turns = turns
        self._weights = weights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif tier.get() == FLEX:
            await self._in_turn(scope, receive, send)
        else:
            with self._turns.online():
                await self._app(scope, receive, send)

    async def _in_turn(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await asgi.read_body(receive)
        except asgi.ClientGone:
            return
        gone: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future()
            if asgi.CANCELLED in scope.get("extensions", ())
            else asyncio.ensure_future(asgi.disconnected(receive))
        )
        if (probe := tokens_so_far.get()) is None:
            tokens_so_far.set(probe := TokensProbe())
        again = False
        try:
            while await self._gave_way(*asgi.with_body(scope, receive, body), send, gone, probe, again):
                again = True
                if (record := record_tokens.get()) is not None:
                    record(None)
                if not (made := probe.ask()) and probe.told:
                    probe.forget()  # the engine had just completed it; who has tokens has another draw's
                tokens_before.set(() if probe.forgotten else made or tokens_before.get())
        finally:
            gone.cancel()

    async def _gave_way(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        gone: asyncio.Future[None],
        probe: TokensProbe,
        again: bool,
    ) -> bool:
        """Runs it in a task of its own, which waits for its turn first. True when it was aborted for online
        work, and must run again; False when it has ended, or its client is gone.

        again: whether an earlier run gave way.
        """
        begun = aborted = ended = False

        async def sent(message: Message) -> None:
            nonlocal begun
            if not aborted:  # else it is an engine's answer to that
                begun = True
                await send(message)

        def abort() -> bool:
            nonlocal aborted
            if not begun:
                probe.ask()  # afterwards, the engine has forgotten it
                aborted = task.cancel()
            return aborted

        async def run() -> None:
            async with self._turns.batch(again) as turn:
                turn.abort = abort
                weights = self._weights()
                probe.compare(weights)
                probe.weights = weights
                await self._app(scope, receive, sent)

        task = asyncio.create_task(run())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            ended = task.done()
        finally:
            if not ended:
                task.cancel()
                await asyncio.wait({task})  # what it holds is free only then
            if not task.cancelled():
                task.exception()  # else asyncio logs it
        if ended and not aborted:
            task.result()
        return aborted and not gone.done()
