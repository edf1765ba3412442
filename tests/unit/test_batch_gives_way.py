"""Batch requests that give way to online work, before an app that says what it has made."""

import asyncio
from collections.abc import Sequence
from typing import Any

from penstock import asgi
from penstock.engine import Load
from penstock.request_context import ChoiceTokens, tier, tokens_before, tokens_so_far
from penstock.serve.replica.tiers.controller import Targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.tiers import FLEX


async def test_what_was_told_of_an_answer_is_not_gone_on_with_by_another_one():
    share = BatchShare(Load, Targets(), lambda: 0.0)
    share._done_s = 1000.0  # so that its work may be lost
    began_with: list[object] = []
    told: list[Sequence[object]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        began_with.append(tokens_before.get())
        made, probe = [[ChoiceTokens([1, 2, 3])]], tokens_so_far.get()
        assert probe is not None
        probe.report(lambda after: made)
        told.append(probe.since(0))
        if len(told) == 1:
            made = []  # the engine has completed it, and knows it no longer
            share._abort(1)
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    tier.set(FLEX)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [], "extensions": {asgi.CANCELLED: {}}}
    await ByClass(app, Turns(share))(scope, asgi.replay(b"{}", asgi.stay), send)
    assert sent[-1]["body"] == b"{}"
    assert began_with == [(), ()]
    assert told == [[[ChoiceTokens([1, 2, 3])]], ()]
