"""Probes a new child: is it up, does it make tokens, how long is its context window."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from penstock.engines import foreign
from penstock.engines.process.child import Child
from penstock.engines.process.wire import BROKEN, Wire
from penstock.errors import ModelNotFound

DYING_S = 5.0
"""Seconds. A connection that breaks this close before the child's end broke because of it."""

_KNOCK_S = 0.1
_KNOCK_LIMIT_S = 5.0
ABSENT = (404, 405, 501)
"""Statuses of a path that a server has not."""

_TOKENS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
)
"""Requests for one token or an embedding; a model serves at least one of them."""


class NotReady(Exception):
    """Why a child cannot be used, as the end of a sentence about it."""


async def unless_ended(child: Child, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`. Raises: NotReady when the child ends first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, child.ended}, return_when=asyncio.FIRST_COMPLETED)
        if isinstance(task.done() and task.exception(), BROKEN):  # perhaps because it is ending
            await asyncio.wait({child.ended}, timeout=DYING_S)
        if child.ended.done():
            raise NotReady(child.ended.result())
        try:
            task.result()
        except BROKEN as error:
            raise NotReady("it broke off an answer") from error
    finally:
        task.cancel()


async def answer(wire: Wire, path: str) -> None:
    """Returns when `path` answers 200."""
    while True:
        try:
            status, _ = await wire.get(path, _KNOCK_LIMIT_S)
            if status == 200:
                return
        except (*BROKEN, TimeoutError):
            pass
        await asyncio.sleep(_KNOCK_S)


async def token(wire: Wire, name: str) -> None:
    """Has it make one token, or an embedding. Raises: NotReady; one of BROKEN."""
    refused = ""
    for path, body in _TOKENS:
        status, said = await wire.post(path, {"model": name, **body})
        if status == 200:
            return
        error = foreign.heard(said, status)
        if isinstance(error, ModelNotFound):
            raise NotReady(
                f"it does not know a model '{name}': give it {{model_id}} in its command, or say what it "
                "calls the model as served_model_name"
            )
        if status not in ABSENT and not refused:
            refused = f"it answered {path} with status {status}: {foreign.said(said)[0]}"
    paths = ", ".join(path for path, _ in _TOKENS)
    raise NotReady(
        refused or f"it answers none of {paths}; if it is not meant to, say `warm_up: false` in engine_kwargs"
    )


async def card(wire: Wire, name: str) -> ModelCard:
    """The model's entry in its list of models; without content if there is none. Raises: one of BROKEN."""
    async with wire.request("GET", "/v1/models") as listed:
        body = await listed.read()
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError):
        cards = []
    return next((card for card in cards if card.id == name), ModelCard())


class ModelCard(msgspec.Struct):
    """Units: max_model_len in tokens."""

    id: str = ""
    max_model_len: int | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct):
    data: list[ModelCard] = []
