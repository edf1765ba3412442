"""Fast path: chunks of a plain stream without building each one from vLLM's response classes.

Wraps vLLM's chunk generators, which still make the first and last chunks, count tokens, and report errors. In
between, where chunks differ only in their text, it puts each text into the frame found in vLLM's own chunk. A
stream that shows no such frame stays vLLM's throughout.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Self

from pydantic_core import to_json
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestState

from penstock.engines.vllm.frontend.gated_llm import request_state
from penstock.request_context import EventFrame, Shortcut, shortcut

log = logging.getLogger(__name__)

Chunks = AsyncGenerator[str | bytes, None]
Outputs = AsyncGenerator[Any, None]

_CHAT_LABEL, _COMPLETION_LABEL = '"delta":{"content":', '"text":'
_PLAIN_END = re.compile(r'\}?(,"\w+":null)+\}\](,"\w+":null)*\}\n\n')
"""Only nulls after the text: no logprobs, no token ids, no usage, no finish reason."""


def use_fast_path(state: Any) -> None:
    """Installs the fast path for chats and completions in the state of vLLM's app."""
    chat = getattr(state, "openai_serving_chat", None)
    if chat is not None and chat.parser_cls is None and _quiet(chat):
        chat.chat_completion_stream_generator = _chat(chat.chat_completion_stream_generator)
    completion = getattr(state, "openai_serving_completion", None)
    if completion is not None and _quiet(completion):
        completion.completion_stream_generator = _completion(completion.completion_stream_generator)


def use_beside_tools(state: Any) -> None:
    """Installs it for chats that may call no tool, of a model whose tool parser leaves those as they are."""
    chat = getattr(state, "openai_serving_chat", None)
    if chat is not None and chat.parser_cls is not None and _leaves_text(chat.parser_cls) and _quiet(chat):
        own = chat.chat_completion_stream_generator
        chat.chat_completion_stream_generator = _chat(own, _calls_no_tool, sends_empty=False)


def _leaves_text(parser: Any) -> bool:
    """Whether the text of a chat without tools passes as it is; of an empty text vLLM then makes no chunk.

    Reasoning would be taken out, and parsers that stream by themselves take markers out of every text.
    """
    from vllm.parser.abstract_parser import DelegatingParser

    plain = parser.__bases__ == (DelegatingParser,) and parser.reasoning_parser_cls is None
    return plain and not parser.tool_parser_cls.engine_based_streaming


def _calls_no_tool(request: Any) -> bool:
    return request.tool_choice == "none"  # also what vLLM sets where a request has no tools


def _chat(
    make: Callable[..., Chunks],
    fits: Callable[[Any], bool] = lambda request: True,
    *,
    sends_empty: bool = True,
) -> Callable[..., Chunks]:
    def chunks(request: Any, outputs: Outputs, *args: Any, **kwargs: Any) -> Chunks:
        if not _is_one(request) or not fits(request):
            return make(request, outputs, *args, **kwargs)
        fed = _Fed(outputs, sends_empty)
        return _stream(fed, make(request, fed, *args, **kwargs), _CHAT_LABEL)

    return chunks


def _completion(make: Callable[..., Chunks]) -> Callable[..., Chunks]:
    def chunks(request: Any, prompts: list[Any], outputs: Outputs, *args: Any, **kwargs: Any) -> Chunks:
        if len(prompts) > 1 or not _is_one(request):
            return make(request, prompts, outputs, *args, **kwargs)
        fed = _Fed(outputs)
        return _stream(fed, make(request, prompts, fed, *args, **kwargs), _COMPLETION_LABEL)

    return chunks


def _quiet(serving: Any) -> bool:
    return serving.request_logger is None or not getattr(serving, "enable_log_outputs", False)


def _is_one(request: Any) -> bool:
    """Whether it has one output, and no echo that may look like its first text."""
    return request.n in (None, 1) and not request.use_beam_search and not request.echo


async def _stream(fed: _Fed, own: Chunks, label: str) -> Chunks:
    """vLLM's chunks until one shows the frame, then ours, and vLLM's again from the last output on."""
    try:
        async for chunk in own:
            yield chunk
            if frame := _frame(chunk, label, fed.text):
                break
        else:
            return
        way, state = shortcut.get(), request_state.get()
        if way is not None and way.open and state is not None and state.stream_interval == 1:
            with _Tap(state, fed, frame, way) as tap:
                async for text in fed.middle():
                    await tap.send(text)
        else:
            async for text in fed.middle():
                yield frame.around(_quoted(text))
        async for chunk in own:
            yield chunk
    finally:
        await own.aclose()
        await fed.outputs.aclose()


def _quoted(text: str) -> bytes:
    """As it stands between the quotes of a JSON string."""
    return to_json(text)[1:-1]


def _frame(chunk: str | bytes, label: str, text: str | None) -> EventFrame | None:
    """The frame of a chunk that carries `text` and nothing else that changes."""
    if text is None:
        return None
    head, found, tail = str(chunk).partition(label + to_json(text).decode())
    if not found or not _PLAIN_END.fullmatch(tail):
        return None
    return EventFrame(f'{head}{label}"'.encode(), f'"{tail}'.encode())


class _Fed:
    """Feeds the engine's outputs to vLLM's generator, without those that the fast path has sent."""

    def __init__(self, outputs: Outputs, sends_empty: bool = True) -> None:
        """outputs: of `RequestOutput`, or, for completions, pairs of an index and one. sends_empty: whether
        an output without text makes a chunk.
        """
        self.outputs = outputs
        self.sends_empty = sends_empty
        self.text: str | None = None
        self._token_ids: list[int] = []
        self._next: Any = None
        self._error: Exception | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        if self._error is not None:
            raise self._error
        item, self._next = self._next, None
        if item is None:
            item = await anext(self.outputs)
        self.text = _output(item).outputs[0].text
        return item

    async def middle(self) -> AsyncGenerator[str, None]:
        """Texts of the outputs up to the last one, which is left for vLLM's generator, as is an error."""
        try:
            async for item in self.outputs:
                output = _output(item)
                one = output.outputs[0]
                if output.finished or one.finish_reason is not None:
                    one.token_ids = [*self._token_ids, *one.token_ids]  # it counts the tokens that it sees
                    self._next = item
                    return
                self.count(one.token_ids)
                if one.text or self.sends_empty:
                    yield one.text
        except Exception as error:
            self._error = error

    def count(self, token_ids: Sequence[int]) -> None:
        """These are of a text that vLLM's generator does not see."""
        self._token_ids += token_ids


class _Tap:
    """Sends texts straight from the engine's output handler, without making outputs or waking the request's
    task.

    The last output, errors, and everything while the reader is slow take the usual path: through the
    collector, which merges them, and the task.
    """

    def __init__(self, state: RequestState, fed: _Fed, frame: EventFrame, way: Shortcut) -> None:
        assert state.queue is not None
        assert state.detokenizer is not None
        self._state = state
        self._taken = state.queue
        self._next_text = state.detokenizer.get_next_output_text
        self._make = state.make_request_output
        self._whole = not hasattr(state.detokenizer, "released")  # as a `StoppableText` has
        self._sends_empty = fed.sends_empty = fed.sends_empty and self._whole
        self._record = getattr(state.queue, "passed", None)  # as a `Journal` has
        self._fed = fed
        self._frame = frame
        self._way = way
        self._flows = True

    def __enter__(self) -> Self:
        self._state.make_request_output = self._output
        return self

    def __exit__(self, *exc: object) -> None:
        del self._state.make_request_output  # restores the method of its class

    async def send(self, text: str) -> None:
        """Called by the task. Outputs that arrive meanwhile go into the collector, to be sent afterwards."""
        self._flows = False
        await self._way.room()
        self._flows = self._way.push(self._frame, _quoted(text))

    def _output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """In place of the state's own: the output for the collector; None when its text was sent."""
        if finish_reason is not None or not self._flows or self._taken.output is not None:
            return self._make(new_token_ids, pooling_output, finish_reason, *args, **kwargs)
        if self._whole:  # else the output that comes next has their ids, too
            self._fed.count(new_token_ids)
        if self._record is not None:
            self._record(new_token_ids)
        try:
            text = self._next_text(False, True)
            if text or self._sends_empty:
                self._flows = self._way.push(self._frame, _quoted(text))
        except Exception as error:  # raised here, it would end all requests' outputs
            log.exception("A piece of %s cannot be sent past its task", self._state.external_req_id)
            self._flows = False
            self._taken.put(error)
        return None


def _output(item: Any) -> RequestOutput:
    return item[1] if isinstance(item, tuple) else item
