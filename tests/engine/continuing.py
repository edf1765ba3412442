"""Stands where a replica's server does: it records a stream, and has another one go on from any point of it.

And the kinds of requests for which that must be exact.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from asking import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, user
from enginetest import MODEL_ID
from tests.waiting import until

from penstock import request_context
from penstock.asgi import TRUSTED, ASGIApp, Message
from penstock.request_context import ChoiceTokens, EventFrame, TokensProbe
from recipes.assistant.lessons import tool

Group = Sequence[ChoiceTokens]
Kind = tuple[str, dict[str, Any]]

_TEXTS = ("content", "reasoning", "arguments", "text", "thinking", "partial_json", "delta", "token_ids")
_TEXTS += ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Fields by which the events of a stream add to what was said before."""


LETTERS = {"enum": ["é", "b", "🙂", "日本"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": LETTERS, "maxItems": 5},
        "n": {"type": "integer"},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "look"}}

SUM, PARIS, TWO = (
    {"messages": user(text)}
    for text in ("What is 2 + 3?", "What is the weather in Paris?", "What is the weather in Rome and Oslo?")
)
TEXT = {"prompt": "Penstock is", "ignore_eos": True, "max_tokens": 40}
GREEDY, HOT = {"temperature": 0}, {"temperature": 1.0}
USAGE = {"stream_options": {"include_usage": True}}
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 1.0}

PLAIN: dict[str, Kind] = {
    "greedy completion": (COMPLETIONS, TEXT | GREEDY | USAGE),
    "greedy chat": (CHAT, SUM | GREEDY | USAGE),
    "seeded": (COMPLETIONS, TEXT | HOT | {"seed": 7}),
    "seeded, top-p and top-k": (CHAT, SUM | {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 11}),
    "penalties": (COMPLETIONS, TEXT | GREEDY | PENALTIES | {"repetition_penalty": 1.2}),
    "penalties, seeded": (COMPLETIONS, TEXT | HOT | PENALTIES | {"seed": 3}),
    "two stop strings": (COMPLETIONS, TEXT | HOT | {"seed": 5, "min_tokens": 20, "stop": ["th", "e s"]}),
    "held back for a stop string": (COMPLETIONS, TEXT | GREEDY | {"stop": ["en d", "e e", "s a"]}),
    "stop string that is sent": (
        CHAT,
        SUM | HOT | {"seed": 8, "stop": ["."], "include_stop_str_in_output": True, "ignore_eos": True},
    ),
    "stop token": (COMPLETIONS, TEXT | HOT | {"seed": 6, "stop_token_ids": list(range(300, 340))}),
    "bad words": (COMPLETIONS, TEXT | GREEDY | {"bad_words": ["the", " engine"]}),
    "logit bias": (COMPLETIONS, TEXT | HOT | {"seed": 4, "logit_bias": {"300": 5, "301": -100}}),
    "parts of characters": (
        COMPLETIONS,
        TEXT | HOT | {"seed": 21, "structured_outputs": {"regex": "(日本|🙂|é|ü){12}"}, "ignore_eos": False},
    ),
    "schema": (CHAT, SUM | HOT | {"seed": 9, "max_tokens": 120, "response_format": FORM}),
    "regex": (
        COMPLETIONS,
        {"prompt": "a", "max_tokens": 60, "seed": 2}
        | HOT
        | {"structured_outputs": {"regex": "([a-z]{3}-[0-9]{2} ){4}end"}},
    ),
    "two choices": (CHAT, SUM | HOT | USAGE | {"n": 2, "seed": 12, "max_tokens": 30}),
    "two choices, one ends early": (
        COMPLETIONS,
        TEXT
        | HOT
        | {"n": 2, "seed": 33, "min_tokens": 8, "stop": ["zzq"], "stop_token_ids": list(range(300, 360))},
    ),
    "logprobs": (
        CHAT,
        SUM | HOT | {"seed": 32, "logprobs": True, "top_logprobs": 3, "n": 2, "max_tokens": 40},
    ),
    "logprobs and stop strings": (
        COMPLETIONS,
        TEXT | HOT | {"seed": 31, "logprobs": 2, "stop": ["en d", "e e", "s a"]},
    ),
    "echo": (COMPLETIONS, TEXT | GREEDY | {"echo": True}),
    "token ids": (CHAT, SUM | GREEDY | {"return_token_ids": True}),
}
"""Requests to a model whose streams take the fast path, and some that cannot."""

PARSED: dict[str, Kind] = {
    "reasoning": (CHAT, SUM | GREEDY | USAGE),
    "stop string in the answer": (CHAT, SUM | GREEDY | {"stop": ["is 5", "zzz"]}),
    "tool": (CHAT, PARIS | GREEDY | {"tools": [tool("get_weather"), tool("get_time")]}),
    "two tools": (CHAT, TWO | GREEDY | USAGE | {"tools": [tool("get_weather")]}),
    "required tool": (
        CHAT,
        SUM | HOT | {"seed": 13, "max_tokens": 160, "tools": [LOOK], "tool_choice": "required"},
    ),
    "named tool": (CHAT, SUM | GREEDY | {"max_tokens": 160, "tools": [LOOK], "tool_choice": NAMED}),
    "schema after reasoning": (CHAT, SUM | HOT | {"seed": 9, "max_tokens": 160, "response_format": FORM}),
    "two choices": (CHAT, SUM | HOT | {"n": 2, "seed": 12, "max_tokens": 40}),
    "response": (RESPONSES, {"input": "What is 2 + 3?"} | GREEDY),
    "response with a tool": (
        RESPONSES,
        {
            "input": "What is the weather in Paris?",
            "tools": [{"type": "function"} | tool("get_weather")["function"]],
        }
        | GREEDY,
    ),
    "message": (MESSAGES, SUM | GREEDY | {"max_tokens": 40}),
    "message with a tool": (
        MESSAGES,
        PARIS
        | GREEDY
        | {
            "max_tokens": 60,
            "tools": [
                {"name": "get_weather", "input_schema": tool("get_weather")["function"]["parameters"]},
            ],
        },
    ),
    "generate": (
        GENERATE,
        {"prompt": "Penstock is", "sampling_params": HOT | {"seed": 5, "max_tokens": 30, "ignore_eos": True}},
    ),
}
"""Requests to a model that thinks and calls tools."""


class Stream:
    """One answer: its pieces, what was recorded, and how many pieces there were before each record."""

    def __init__(self, slow: random.Random | None = None) -> None:
        """slow: when given, the reader sometimes falls behind, by some tokens of an engine of any speed."""
        self.status = 0
        self.pieces: list[bytes] = []
        self.pushed = 0
        self.groups: list[Group] = []
        self.at: list[int] = []
        self._slow = slow
        self._begun = 0.0

    # what the engine's server sets in the context of a request

    def record(self, group: Group | None) -> None:
        assert group is not None
        self._begun = self._begun or time.monotonic()
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
            tokens = sum(len(one.token_ids) for group in self.groups for one in group)
            token_s = (time.monotonic() - self._begun) / tokens if tokens else 0
            await asyncio.sleep(self._slow.choice([0, 0.3, 3]) * token_s)

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
    headers: dict[str, str] | None = None,
    status: int = 200,
    leaves_after: int | None = None,
    probe: TokensProbe | None = None,
) -> Stream:
    """The answer to one request. short: whether texts may go past the engine's app. leaves_after: pieces."""
    answer = Stream(slow)
    content: bytes | None = json.dumps({"model": MODEL_ID, "stream": True} | body).encode()

    async def receive() -> Message:
        nonlocal content
        if content is None:
            if leaves_after is None:
                await asyncio.Event().wait()
            await until(lambda: len(answer.pieces) >= leaves_after, 60)
            return {"type": "http.disconnect"}
        message, content = {"type": "http.request", "body": content}, None
        return message

    named = {"content-type": "application/json", "x-request-id": "asked-twice"} | (headers or {})
    fields = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": fields}
    scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": "", "extensions": {TRUSTED: {}}}

    async def ask() -> None:
        request_context.record_tokens.set(answer.record if probe is None else None)  # rows have no record
        request_context.tokens_before.set(before)
        request_context.tokens_so_far.set(probe)
        request_context.shortcut.set(answer if short else None)
        request_context.created.set(1_800_000_000)
        request_context.id_seed.set("5eed")
        request_context.current_replica.set("0123456789abcdef")
        await app(scope, receive, answer.send)

    await asyncio.create_task(ask())
    assert leaves_after is not None or answer.status == status, answer.pieces
    return answer


async def differences(app: ASGIApp, kind: Kind, cuts: int, draw: random.Random, **how: Any) -> list[str]:
    """How answers that go on from random groups differ from the whole one.

    cuts: their number, besides those before the last group and after it.
    """
    path, body = kind
    whole = await stream(app, path, body, **how)
    assert whole.groups, "it was not recorded"
    last = len(whole.groups)
    places = {last, last - 1} | set(draw.sample(range(1, last + 1), min(cuts, last)))
    return [
        f"after {groups} of {last} groups: {fault[:700]}"
        for groups in sorted(places - {0})
        for fault in await continued(app, path, body, whole, groups, **how)
    ]


class Cut(TokensProbe):
    """Of an answer that is not streamed: ends its request as soon as it has so many tokens."""

    def __init__(self, at: int = 1 << 30) -> None:
        super().__init__()
        self.at, self.groups, self.handed = at, list[Group](), list[Group]()
        self.most, self._look = 0, lambda: list[Group]()

    def report(self, ask: Any) -> None:
        super().report(ask)
        self._look = ask or list[Group]

    async def answer(self, app: ASGIApp, kind: Kind, before: Sequence[Group] = ()) -> bytes:
        """b"" when it was ended; then `groups` are what it had."""
        path, body = kind
        more: dict[str, Any] = (
            {"stream": False, "stream_options": None} if path != RESPONSES else {"stream": False}
        )
        task = asyncio.create_task(stream(app, path, body | more, before, probe=self))

        def has_enough() -> bool:
            self.handed += self.since(_count(self.handed))  # as a gateway hears of it
            tokens = _count(self._look())
            self.most = max(self.most, tokens)
            return self.at <= tokens

        await until(lambda: task.done() or has_enough(), 60)
        if not task.done():
            self.groups = self.handed if self.at > 1 else list(self.ask())
            task.cancel()
            await asyncio.wait({task})
            return b""
        return b"".join(task.result().pieces)


async def differences_whole(app: ASGIApp, kind: Kind, cuts: int) -> list[str]:
    """How answers that are not streamed and go on from what they had differ from the one that was not cut."""
    first = Cut()
    await Cut().answer(app, kind)  # from now on the prompt is in the cache
    expected = await first.answer(app, kind)
    assert first.most > cuts, "its tokens were not told"
    found = list[str]()
    for at in range(1, first.most, max(1, first.most // cuts)):
        cut, rest = Cut(at), Cut()
        if await cut.answer(app, kind) == b"":
            had = _count(cut.groups)
            answer = await rest.answer(app, kind, cut.groups)
            if _said(answer) != _said(expected):
                found.append(f"after {had} of {first.most} tokens: {answer!r}, not {expected!r}")
    return found


def _count(groups: Sequence[Group]) -> int:
    return sum(len(one.token_ids) for group in groups for one in group)


def _said(answer: bytes) -> Any:
    """A logprob's last digits depend on what was computed with its token."""
    return json.loads(answer, parse_float=lambda _: 0.0)


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

    How many tokens an event has depends on time, and so do which choice is ahead, and whether the last text
    comes with the end.
    """
    found: dict[str, list[Any]] = {}
    lines = b"".join(pieces).decode().splitlines()
    found["other"] = [line for line in lines if line.startswith("data: ") and line[6] != "{"]
    # A logprob's last digits depend on what was computed with its token.
    events = (json.loads(line[6:], parse_float=lambda _: 0.0) for line in lines if line.startswith("data: {"))
    for event in events:
        choices = event.get("choices")
        at = choices[0]["index"] if choices else event.get("index", -1)
        event.pop("sequence_number", None)
        for choice in choices or ():  # a parser says null of a part that another event has beside its text
            if delta := choice.get("delta"):
                choice["delta"] = {key: one for key, one in delta.items() if one is not None}
        texts = _texts(event)
        for name, text in texts:
            if not text:
                continue
            items = found.setdefault(f"{at} {name if isinstance(text, list) else ''}", [])
            if items and items[-1][0] == name:
                items[-1][1] += text
            else:
                items.append([name, text])
        for part in _parts(event):
            kind = json.dumps(part)
            # A tool's call, or where an item or block begins or ends.
            if '"name": "' in kind or ("type" in part and not texts):
                items = found.setdefault(f"{at} ", [])
                items += [[kind]] if [kind] not in items else []
            elif kind not in (kinds := found.setdefault(f"{at} kinds", [])):
                kinds.append(kind)
    return found


def _parts(event: Any) -> list[Any]:
    """The event, or its text and its end as two."""
    choices = event.get("choices")
    if not choices or not choices[0].get("delta") or choices[0].get("finish_reason") is None:
        return [event]
    (choice,) = choices
    text = choice | {"finish_reason": None, "stop_reason": None}
    return [event | {"choices": [one]} for one in (text, choice | {"delta": {}})]


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
    return found
