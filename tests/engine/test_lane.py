"""What the fast lane sends is, chunk by chunk, what vLLM's own generators make of the same outputs."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from enginetest import MODEL_ID, Served
from tests.waiting import until

from penstock.request_context import EventFrame, shortcut

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ["What is Penstock?", "Wie geht es dir heute, alter Freund?", "日本語で話して", "🙂🙃 ok", ""]
STOPS = [None, "e", ["the", " of"], ["s a", "n t", "er"], ".", ["zzz"]]


class Recorder:
    """Stands around a serving's lane: keeps its chunks, and vLLM's chunks for the same outputs."""

    def __init__(self, serving: Any, name: str, outputs_at: int) -> None:
        self.lane: Callable[..., Any] = getattr(serving, name)
        self.own: Callable[..., Any] = getattr(type(serving), name).__get__(serving)
        self.outputs_at = outputs_at
        self.sent: list[tuple[list[str], list[str]]] = []
        self.fast = 0
        self.after: Exception | None = None
        self.end = partial(setattr, serving, name, self.lane)
        setattr(serving, name, self.make)

    async def make(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The lane's chunks."""
        came: list[Any] = []
        theirs = list(args)
        theirs[self.outputs_at] = self._record(args[self.outputs_at], came)
        chunks: list[Any] = []
        try:
            async for chunk in self.lane(*theirs, **kwargs):
                chunks.append(chunk)
                yield chunk
        finally:
            theirs[self.outputs_at] = self._replay(came)
            expected = [chunk async for chunk in self.own(*theirs, **kwargs)]
            self.fast += any(isinstance(chunk, bytes) for chunk in chunks)
            self.sent.append(([_masked(chunk) for chunk in chunks], [_masked(chunk) for chunk in expected]))

    async def _record(self, outputs: Any, came: list[Any]) -> AsyncIterator[Any]:
        try:
            async for output in outputs:
                came.append(copy.deepcopy(output))
                yield output
                if self.after is not None and len(came) == 3:
                    came.append(self.after)
                    raise self.after
        finally:
            await outputs.aclose()

    async def _replay(self, came: list[Any]) -> AsyncIterator[Any]:
        for output in came:
            if isinstance(output, Exception):
                raise output
            yield output


def _masked(chunk: str | bytes) -> str:
    text = chunk.decode() if isinstance(chunk, bytes) else chunk
    return re.sub(r'"(id)":"[^"]*"|"(created)":\d+', r'"\1\2":0', text)


class Recorded:
    def __init__(self, served: Served, recorders: dict[str, Recorder]) -> None:
        self.served, self.recorders = served, recorders

    async def ask(self, path: str, body: dict[str, Any]) -> None:
        """Streams one answer to its end."""
        body = {"model": MODEL_ID, "stream": True} | body
        async with self.served.http.stream("POST", path, json=body) as response:
            answer = await response.aread()
            assert response.status_code == 200, answer

    def take(self, path: str) -> list[tuple[list[str], list[str]]]:
        sent, self.recorders[path].sent = self.recorders[path].sent, []
        return sent


@pytest.fixture
def recorded(demo: Served) -> Iterator[Recorded]:
    """The shared engine with a recorder around each of its lanes, for as long as a test runs."""
    app: Any = demo.engine.app()
    state = app._app._app.state  # of vLLM's own app, behind the edge and the short way
    recorders = {
        CHAT: Recorder(state.openai_serving_chat, "chat_completion_stream_generator", 1),
        COMPLETIONS: Recorder(state.openai_serving_completion, "completion_stream_generator", 2),
    }
    try:
        yield Recorded(demo, recorders)
    finally:
        for recorder in recorders.values():
            recorder.end()


def _body(draw: random.Random, path: str) -> dict[str, Any]:
    text = draw.choice(WORDS)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if path == COMPLETIONS:
        prompt = {"prompt": draw.choice([text or "a", [5, 6, 7, 8]])}
    usage = draw.choice([None, {"include_usage": True}])
    return prompt | {
        "max_tokens": draw.choice([1, 7, 30, 40]),
        "temperature": draw.choice([0.0, 1.0, 2.0]),
        "seed": draw.randrange(1000),
        "stop": draw.choice(STOPS),
        "ignore_eos": draw.random() < 0.5,
        "echo": draw.random() < 0.1,
        "include_stop_str_in_output": draw.random() < 0.3,
        **({"stream_options": usage} if usage else {}),
    }


async def test_240_streams_are_sent_as_vllm_sends_them(recorded: Recorded) -> None:
    draw = random.Random(7)
    asked = [(path, _body(draw, path)) for path in (CHAT, COMPLETIONS) * 120]
    for at in range(0, len(asked), 12):  # a dozen at once: outputs of several steps come merged, too
        await asyncio.gather(*(recorded.ask(path, body) for path, body in asked[at : at + 12]))
    sent = recorded.take(CHAT) + recorded.take(COMPLETIONS)
    assert len(sent) == 240
    assert all(chunks == expected for chunks, expected in sent)
    assert all(recorder.fast > 40 for recorder in recorded.recorders.values())
    told = "".join(chunk for chunks, _ in sent for chunk in chunks)
    for what in ('"finish_reason":"stop"', '"finish_reason":"length"', '"stop_reason":"', '"usage":{'):
        assert what in told
    assert '"delta":{"content":""}' in told, "no text was held back"
    assert re.search(r"[^\x00-\x7f]", told), "no text beyond ASCII"


async def test_streams_that_are_not_plain_are_vllms_own(recorded: Recorded) -> None:
    before = [recorder.fast for recorder in recorded.recorders.values()]
    chat = {"messages": [{"role": "user", "content": "What is Penstock?"}], "max_tokens": 8}
    usage = {"include_usage": True, "continuous_usage_stats": True}
    more: list[dict[str, Any]] = [
        {"n": 2, "temperature": 1.0},
        {"logprobs": True, "top_logprobs": 2},
        {"return_token_ids": True},
        {"stream_options": usage},
        {"echo": True},
        {"n": 1, "return_tokens_as_token_ids": True, "logprobs": True},
    ]
    for fields in more:
        await recorded.ask(CHAT, chat | fields)
    for fields in [
        {"prompt": ["a", "b"]},
        {"logprobs": 0},
        {"n": 2},
        {"echo": True},
        {"stream_options": usage},
    ]:
        await recorded.ask(COMPLETIONS, {"prompt": "What is", "max_tokens": 8} | fields)
    sent = recorded.take(CHAT) + recorded.take(COMPLETIONS)
    assert len(sent) == 11
    assert all(chunks == expected for chunks, expected in sent)
    assert [recorder.fast for recorder in recorded.recorders.values()] == before


async def test_an_aborted_request_ends_as_vllm_ends_it(recorded: Recorded) -> None:
    llm: Any = recorded.served.engine._llm  # pyright: ignore[reportAttributeAccessIssue]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}
    asking = asyncio.create_task(recorded.ask(CHAT, body))
    states = llm.output_processor.request_states
    await until(lambda: any(not state.is_prefilling for state in states.values()))  # its first token is there
    await llm.pause_generation(mode="abort")
    await asking
    await llm.resume_generation()
    ((chunks, expected),) = recorded.take(CHAT)
    assert chunks == expected
    assert '"finish_reason":"abort"' in chunks[-2]


async def test_an_error_in_the_middle_is_told_as_vllm_tells_it(recorded: Recorded) -> None:
    recorder = recorded.recorders[CHAT]
    recorder.after = RuntimeError("of a worker")
    try:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "ignore_eos": True}
        await recorded.ask(CHAT, body)
    finally:
        recorder.after = None
    ((chunks, expected),) = recorded.take(CHAT)
    assert chunks == expected
    assert json.loads(chunks[-2][6:])["error"]
    await until(lambda: recorded.served.engine.load().running == 0)


async def test_a_client_that_leaves_aborts_its_request(recorded: Recorded) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}
    body |= {"model": MODEL_ID, "stream": True}
    async with recorded.served.http.stream("POST", CHAT, json=body) as response:
        await anext(response.aiter_bytes())
        assert recorded.served.engine.load().running == 1
    await until(lambda: recorded.served.engine.load().running == 0)
    await until(lambda: bool(recorded.recorders[CHAT].sent))
    ((chunks, expected),) = recorded.take(CHAT)
    assert chunks == expected[: len(chunks)]


@pytest.fixture
def beside_tools(demo: Served) -> Iterator[Recorded]:
    """The shared engine as if it had a tool parser, with a recorder around the lane of its chats."""
    from vllm.parser import ParserManager

    from penstock.engines.vllm.frontend.fast_stream import use_beside_tools

    app: Any = demo.engine.app()
    chat = app._app._app.state.openai_serving_chat
    renderer, before = chat.online_renderer, chat.chat_completion_stream_generator
    del chat.chat_completion_stream_generator
    chat.parser_cls = renderer.parser = ParserManager.get_parser("hermes", enable_auto_tools=True)
    chat.enable_auto_tools = renderer.enable_auto_tools = True
    use_beside_tools(app._app._app.state)
    recorder = Recorder(chat, "chat_completion_stream_generator", 1)
    try:
        yield Recorded(demo, {CHAT: recorder})
    finally:
        chat.chat_completion_stream_generator = before
        chat.parser_cls = renderer.parser = None
        chat.enable_auto_tools = renderer.enable_auto_tools = False


async def test_chats_without_tools_beside_a_tool_parser_are_as_vllm_sends_them(beside_tools: Recorded):
    draw = random.Random(11)
    asked = [_body(draw, CHAT) for _ in range(60)]
    for at in range(0, len(asked), 12):
        await asyncio.gather(*(beside_tools.ask(CHAT, body) for body in asked[at : at + 12]))
    sent = beside_tools.take(CHAT)
    assert len(sent) == 60
    assert all(chunks == expected for chunks, expected in sent)
    assert beside_tools.recorders[CHAT].fast > 20
    assert '"delta":{"content":""}' not in "".join(chunk for chunks, _ in sent for chunk in chunks)


async def test_chats_that_may_call_a_tool_are_vllms_own(beside_tools: Recorded):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "tools": [tool]}
    await beside_tools.ask(CHAT, body)
    assert not beside_tools.recorders[CHAT].fast
    await beside_tools.ask(CHAT, body | {"tool_choice": "none", "ignore_eos": True})
    assert beside_tools.recorders[CHAT].fast == 1
    assert all(chunks == expected for chunks, expected in beside_tools.take(CHAT))


@pytest.mark.parametrize(("tools", "reasoning"), [("qwen3_coder", None), ("hermes", "deepseek_r1")])
async def test_a_parser_that_changes_text_keeps_vllms_own_streams(tools: str, reasoning: str | None):
    from vllm.parser import ParserManager

    from penstock.engines.vllm.frontend.fast_stream import use_beside_tools

    parser = ParserManager.get_parser(tools, reasoning, enable_auto_tools=True)
    chat = SimpleNamespace(parser_cls=parser, request_logger=None, chat_completion_stream_generator=None)
    use_beside_tools(SimpleNamespace(openai_serving_chat=chat))
    assert chat.chat_completion_stream_generator is None


class Way:
    """A shortcut that keeps what is sent by it, and in what order with what goes by the app."""

    open = True

    def __init__(self, pieces: list[bytes], room_after: int | None = None) -> None:
        """room_after: pieces after which the reader is behind, each time."""
        self.pieces = pieces
        self.room_after = room_after
        self.pushed = self.waited = 0
        self.behind = False

    def push(self, frame: EventFrame, text: bytes) -> bool:
        self.pieces.append(frame.around(text))
        self.pushed += 1
        self.behind = self.room_after is not None and self.pushed % self.room_after == 0
        return not self.behind

    async def room(self) -> None:
        if self.behind:
            self.waited += 1
            await asyncio.sleep(0.05)  # some steps of the engine, on a slow machine too


class Gone(Way):
    """Its reader has left after some pieces."""

    def push(self, frame: EventFrame, text: bytes) -> bool:
        if self.pushed == 5:
            raise KeyError("the stream")
        return super().push(frame, text)


async def _by(app: Any, way: Way | None, body: dict[str, Any]) -> list[str]:
    """The pieces of an answer, masked, whichever way they come."""
    pieces: list[bytes] = way.pieces if way else []
    content = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        nonlocal content
        if content is None:
            await asyncio.Event().wait()
        message, content = {"type": "http.request", "body": content}, None
        return message

    async def send(message: Any) -> None:
        if piece := message.get("body"):
            pieces.append(piece)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "root_path": ""}

    async def answer() -> None:
        shortcut.set(way)
        await app(scope, receive, send)

    await asyncio.create_task(answer())
    return [_masked(piece) for piece in pieces]


async def test_by_the_shortcut_comes_the_same_in_the_same_order(recorded: Recorded) -> None:
    app, draw = recorded.served.engine.app(), random.Random(3)
    pushed = 0
    for _ in range(40):
        body = {"model": MODEL_ID, "stream": True} | _body(draw, CHAT)
        way = Way([])
        short, long = await _by(app, way, body), await _by(app, None, body)
        assert _text(short) == _text(long)
        assert (short[0], _end(short)) == (long[0], _end(long))
        pushed += way.pushed
    assert pushed > 200
    recorded.take(CHAT)


async def test_a_reader_that_falls_behind_gets_all_of_it_merged(recorded: Recorded) -> None:
    app = recorded.served.engine.app()
    body = {"model": MODEL_ID, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 450, "ignore_eos": True, "temperature": 0}  # a busy machine sends many at once
    body |= {"stream_options": {"include_usage": True}}
    way = Way([], room_after=8)
    slow, quick = await _by(app, way, body), await _by(app, None, body)
    assert way.waited > 5
    assert len(slow) < 450
    assert _text(slow) == _text(quick)
    assert slow[-2:] == quick[-2:]  # usage and [DONE]
    recorded.take(CHAT)


async def test_a_piece_that_cannot_be_pushed_fails_no_other_request(recorded: Recorded) -> None:
    """It is pushed where the outputs of all requests are handed out."""
    app = recorded.served.engine.app()
    body = {"model": MODEL_ID, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    body |= {"max_tokens": 60, "ignore_eos": True, "temperature": 0}
    way = Gone([])
    broken, whole = await asyncio.gather(_by(app, way, body), _by(app, None, body))
    assert "".join(whole).endswith("data: [DONE]\n\n")
    assert '"error"' in "".join(broken)
    await until(lambda: recorded.served.engine.load().running == 0)
    recorded.take(CHAT)


def _end(chunks: list[str]) -> list[Any]:
    """Why it ended, and what was counted; the text of its last chunk depends on what came merged."""
    assert chunks[-1] == "data: [DONE]\n\n"
    told = [json.loads(chunk[6:]) for chunk in chunks[-3:-1]]
    choices = [choice for chunk in told for choice in chunk["choices"] if choice["finish_reason"]]
    return [[(choice["finish_reason"], choice["stop_reason"]) for choice in choices], told[-1].get("usage")]


def _text(chunks: list[str]) -> str:
    told = [json.loads(chunk[6:])["choices"] for chunk in chunks if not chunk.endswith("[DONE]\n\n")]
    return "".join(choice["delta"].get("content", "") for choices in told for choice in choices)
