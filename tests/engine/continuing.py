"""Stands where a replica's server does: it records a stream, and has another one go on from any point of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

from enginetest import MODEL_ID

from penstock import request_context
from penstock.asgi import TRUSTED, ASGIApp, Message
from penstock.request_context import ChoiceTokens, EventFrame

Group = Sequence[ChoiceTokens]

_TEXTS = ("content", "reasoning", "arguments", "text", "thinking", "partial_json", "delta", "token_ids")
"""Fields by which the events of a stream add to what was said before."""


class Stream:
    """One answer: its pieces, what was recorded, and how many pieces there were before each record."""

    def __init__(self, slow: random.Random | None = None) -> None:
        """slow: when given, the reader sometimes falls behind."""
        self.status = 0
        self.pieces: list[bytes] = []
        self.pushed = 0
        self.groups: list[Group] = []
        self.at: list[int] = []
        self._slow = slow

    # what the engine's server sets in the context of a request

    def record(self, group: Group | None) -> None:
        assert group is not None
        self.groups.append(tuple(group))
        self.at.append(len(self.pieces))

    @property
    def open(self) -> bool:
        return bool(self.pieces)

    def push(self, frame: EventFrame, text: bytes) -> bool:
        self.pieces.append(frame.around(text))
        self.pushed += 1
        return self._slow is None or self._slow.random() < 0.6

    async def room(self) -> None:
        if self._slow is not None:
            await asyncio.sleep(self._slow.choice([0, 0.005, 0.03]))

    async def send(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        if piece := message.get("body"):
            self.pieces.append(piece)
            await self.room()

    # what came of it

    def made(self, groups: int) -> int:
        """Number of the pieces that were made of the first groups."""
        return self.at[groups] if groups < len(self.groups) else len(self.pieces)

    def token_ids(self, choice: int = 0) -> list[int]:
        return [
            token for group in self.groups for one in group if one.choice == choice for token in one.token_ids
        ]


async def stream(
    app: ASGIApp,
    path: str,
    body: dict[str, Any],
    before: Sequence[Group] = (),
    *,
    slow: random.Random | None = None,
    short: bool = True,
    seed: str = "5eed",
) -> Stream:
    """The answer to one request. short: whether texts may go past the engine's app."""
    answer = Stream(slow)
    content: bytes | None = json.dumps({"model": MODEL_ID, "stream": True} | body).encode()
    gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal content
        if content is None:
            await gone.wait()
        message, content = {"type": "http.request", "body": content}, None
        return message

    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"asked-twice")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "", "extensions": {TRUSTED: {}}}

    async def ask() -> None:
        request_context.record_tokens.set(answer.record)
        request_context.tokens_before.set(before)
        request_context.shortcut.set(answer if short else None)
        request_context.created.set(1_800_000_000)
        request_context.id_seed.set(seed)
        request_context.current_replica.set("0123456789abcdef")
        await app(scope, receive, answer.send)

    await asyncio.create_task(ask())
    assert answer.status == 200, answer.pieces
    return answer


async def continued(
    app: ASGIApp, path: str, body: dict[str, Any], whole: Stream, groups: int, **how: Any
) -> list[str]:
    """How an answer that goes on after the first groups of another one differs from it; [] as it must be."""
    again = await stream(app, path, body, whole.groups[:groups], **how)
    made, faults = whole.made(groups), list[str]()
    if again.groups[:1] != [()]:
        faults.append(f"the replay was not confirmed, but {again.groups[:1]}")
    if again.pieces[:made] != whole.pieces[:made]:
        faults.append(f"replayed: {again.pieces[:made]}, not {whole.pieces[:made]}")
    for choice in range(body.get("n", 1)):
        ids = [t for group in whole.groups[:groups] for c in group if c.choice == choice for t in c.token_ids]
        if ids + again.token_ids(choice) != whole.token_ids(choice):
            faults.append(f"token ids: {ids} + {again.token_ids(choice)}, not {whole.token_ids(choice)}")
    if told(again.pieces) != told(whole.pieces):
        faults.append(f"told: {told(again.pieces)}, not {told(whole.pieces)}")
    return faults


def told(pieces: Sequence[bytes]) -> dict[str, list[Any]]:
    """What the events of a stream say together, by choice: their texts joined, and each kind of event once.

    How many tokens an event has depends on time.
    """
    found: dict[str, list[Any]] = {"kinds": []}
    lines = b"".join(pieces).decode().splitlines()
    found["other"] = [line for line in lines if line.startswith("data: ") and line[6] != "{"]
    for event in (json.loads(line[6:]) for line in lines if line.startswith("data: {")):
        choices = event.get("choices")
        at = choices[0]["index"] if choices else event.get("index", -1)
        event.pop("sequence_number", None)
        for name, text in _texts(event):
            items = found.setdefault(f"{at} {name if name == 'token_ids' else ''}", [])
            if items and items[-1][0] == name:
                items[-1][1] += text
            else:
                items.append([name, text])
        kind = json.dumps(event)
        if '"name": "' in kind or "type" in event:  # a tool's call, or where an item or block begins or ends
            items = found.setdefault(f"{at} ", [])
            items += [[kind]] if [kind] not in items else []
        elif kind not in found["kinds"]:
            found["kinds"].append(kind)
    return found


def _texts(event: Any) -> list[tuple[str, Any]]:
    """Takes them out of an event."""
    if event.get("type", "").endswith(
        (".done", ".completed", "_start", ".created", ".added", ".in_progress")
    ):
        return []
    found: list[tuple[str, Any]] = []
    todo = [event]
    while todo:
        part = todo.pop()
        for name in [name for name in part if name in _TEXTS and isinstance(part[name], str | list)]:
            found.append((name, part.pop(name)))
        for inner in part.values():
            todo += [one for one in (inner if isinstance(inner, list) else [inner]) if isinstance(one, dict)]
    return [(name, text) for name, text in found if text]
