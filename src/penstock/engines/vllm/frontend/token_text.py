"""Where generated text, its token ids, stop strings and parsers meet.

Outputs with stop strings hold text and the ids of the same tokens; only tokens that may begin a stop string
are held back. Parsers that depend on how a stream is cut get single tokens, whatever joined them: the queue
of waiting outputs, vLLM's collector, speculative decoding, `stream_interval`. Importing this file imports
vLLM.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.parser.parser_manager import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, check_stop_strings
from vllm.v1.engine.output_processor import RequestState

from penstock.engines.vllm.frontend import limits

log = logging.getLogger(__name__)

Outputs = AsyncGenerator[RequestOutput, None]

_CHATS = ("openai_serving_chat", "anthropic_serving_messages", "cohere_serving_chat_v2")
_ANY = ChatCompletionRequest.model_validate({"messages": []})
_UNFINISHED: dict[str, Any] = dict.fromkeys(
    ("finish_reason", "stop_reason", "routed_experts", "sampling_mask", "spec_decode_metrics"), None
)

_new_state: Any = RequestState.from_new_request

_wanted: ContextVar[bool] = ContextVar("_wanted", default=False)
"""Whether the running request streams to a parser that depends on how its tokens are grouped."""


def hold_stops(config: Any) -> None:
    """Makes stop strings hold text and ids back together, and count in the answer only, not in its reasoning.

    config: vLLM's, of the engine whose requests this process reads.
    """

    def state(*, tokenizer: Any, request: EngineCoreRequest, **more: Any) -> RequestState:
        params = request.sampling_params
        if tokenizer is None or params is None or not params.stop or not params.detokenize:
            return _new_state(tokenizer=tokenizer, request=request, **more)
        made = _new_state.__func__(StoppableState, tokenizer=tokenizer, request=request, **more)
        reasons = request.reasoning_parser_kwargs is not None
        reasoning = Reasoning(config, tokenizer, request) if reasons else None
        made.detokenizer = StoppableText(made.detokenizer, params, reasoning)
        return made

    RequestState.from_new_request = staticmethod(state)  # pyright: ignore[reportAttributeAccessIssue]


class Reasoning:
    """Finds where the answer begins in an output, as the model's reasoning parser streams it."""

    def __init__(self, config: Any, tokenizer: Any, request: EngineCoreRequest) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompt = request.prompt_token_ids or []
        self._options = request.reasoning_parser_kwargs or {}
        self._parser: Any = None
        self._seen = False
        self._read = 0  # tokens
        self._begin: int | None = None

    def answer(self, ids: Sequence[int], text: str, ends: Sequence[int]) -> int | None:
        """Where in `text` the answer begins; None while the model reasons. ends: of each token's text."""
        if self._parser is None:
            self._parser = self._make()
            self._begin = 0 if self._parser.is_reasoning_end(self._prompt) else None
        while self._begin is None and self._read < len(ends):
            at, self._read = self._read, self._read + 1
            piece = text[ends[at - 1] if at else 0 : ends[at]]
            delta = self._parser.parse_delta(piece, [ids[at]], _ANY, self._prompt, finished=False)
            content = (delta and delta.content) or ""
            self._seen |= bool(delta and delta.reasoning)
            if content.strip() or (content and self._seen):
                self._begin = ends[at] - len(content)
        return self._begin

    def _make(self) -> Any:
        model = self._config.model_config
        kind: Any = ParserManager.get_parser(
            reasoning_parser_name=self._config.structured_outputs_config.reasoning_parser,
            is_harmony=model.hf_config.model_type == "gpt_oss",
        )
        return kind(self._tokenizer, None, model_config=model, **self._options)


class StoppableText(IncrementalDetokenizer):
    """The text of an output that stop strings may end, in whole tokens."""

    def __init__(self, whole: Any, params: SamplingParams, reasoning: Reasoning | None) -> None:
        """whole: vLLM's detokenizer of the same request. reasoning: finds what stop strings do not end."""
        super().__init__()
        self._whole = whole
        self._stop: list[str] = whole.stop
        self._included = params.include_stop_str_in_output
        self._least_tokens = params.min_tokens
        self._reasoning = reasoning
        self._ends: list[int] = []  # of each token's text
        self._sent = 0  # characters
        self._first = frozenset(one[0] for one in self._stop)
        self._most = max(map(len, self._stop)) - 1
        self.ready = self.released = 0
        """Tokens whose text may be returned, and was."""
        whole.stop, whole.stop_buffer_length = [], 0

    @property
    def output_token_ids(self) -> list[int]:
        return self._whole.output_token_ids

    def num_output_tokens(self) -> int:
        return len(self._ends)

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Returns the stop string that ended the output. Tokens after it are dropped."""
        for number, token in enumerate(new_token_ids, 1):
            self._whole.update([token], stop_terminated and number == len(new_token_ids))
            before, end = self._ends[-1] if self._ends else 0, len(self._whole.output_text)
            self._ends.append(end)
            if end > before and len(self._ends) > self._least_tokens and (found := self._found(before)):
                stop, end = found
                self._whole.output_text = self._whole.output_text[:end]
                return stop
        self.ready = self._sendable() if self._ends else 0
        return None

    def _found(self, before: int) -> tuple[str, int] | None:
        """The stop string that ends in the text after `before`, and where the text then ends."""
        text, begin = self._whole.output_text, 0
        found = check_stop_strings(text, len(text) - before, self._stop, self._included)
        if found is not None and self._reasoning is not None:
            begin = self._answer(text)
            new = len(text) - max(before, begin)
            found = check_stop_strings(text[begin:], new, self._stop, self._included)
        return found and (found[0], len(text) if found[1] < 0 else begin + found[1])

    def _answer(self, text: str) -> int:
        """Where the answer begins, at the latest at the end of the text."""
        assert self._reasoning is not None
        try:
            begin = self._reasoning.answer(self.output_token_ids, text, self._ends)
            return len(text) if begin is None else begin
        except Exception:  # raised here, it would end all requests' outputs
            log.exception("The end of the reasoning cannot be found; stop strings count everywhere")
            self._reasoning = None
            return 0

    def _sendable(self) -> int:
        """Number of tokens whose text cannot be part of a stop string that has not come whole."""
        text, end, count = self._whole.output_text, self._ends[-1], len(self._ends)
        if self._included or self._first.isdisjoint(text[max(0, end - self._most) :]):
            return count
        tails = range(max(0, end - self._most), end)
        end = next((at for at in tails if any(one.startswith(text[at:]) for one in self._stop)), end)
        while count > self.released and self._ends[count - 1] > end:
            count -= 1
        return count

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        text: str = self._whole.output_text
        self.released = len(self._ends) if finished else self.ready
        if not finished:
            text = text[: self._ends[self.released - 1] if self.released else 0]
        begin, self._sent = self._sent, len(text)
        return text[begin:] if delta else text


class StoppableState(RequestState):
    """The state of a request whose detokenizer is a `StoppableText`."""

    _sent = 0  # tokens

    def make_request_output(
        self, new_token_ids: list[int], pooling_output: Any, finish_reason: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The output; None, too, where all text is held back."""
        text: Any = self.detokenizer
        if finish_reason is None and text.ready == text.released:
            return None
        return super().make_request_output(new_token_ids, pooling_output, finish_reason, *args, **kwargs)

    def _new_completion_output(self, *args: Any, **kwargs: Any) -> CompletionOutput:
        made = super()._new_completion_output(*args, **kwargs)
        text: Any = self.detokenizer
        processor: Any = self.logprobs_processor
        if self.output_kind == RequestOutputKind.DELTA:
            sent, self._sent = self._sent, text.released
            made.token_ids = text.output_token_ids[sent : self._sent]
            made.logprobs = processor.logprobs and processor.logprobs[sent : self._sent]
        return made


def cut_for_parsers(state: Any, llm: Any) -> None:
    """Has streams cut into single tokens for parsers that depend on the cut. state: of vLLM's app."""
    for name in _CHATS:
        parser = getattr(getattr(state, name, None), "parser_cls", None)
        if depends_on_cut(parser):
            limits.before(state, name, "create_chat_completion", partial(_want, parser))
            llm.cut = partial(_cut, llm.get_tokenizer())
    serving = getattr(state, "openai_serving_responses", None)
    if serving is not None and depends_on_cut(serving.parser):
        serving.responses_stream_generator = _events(serving.parser, serving.responses_stream_generator)
        llm.cut = partial(_cut, llm.get_tokenizer())


def depends_on_cut(parser: Any) -> bool:
    """Whether a part of this class of vLLM's parsers does not find the parts of joined tokens itself."""
    kinds = (parser.reasoning_parser_cls, parser.tool_parser_cls) if parser is not None else ()
    return any(kind is not None and not kind.engine_based_streaming for kind in kinds)


def _want(parser: Any, request: Any) -> None:
    """Has the stream of a request cut, if its parser will read it."""
    reads = request.tool_choice != "none" or parser.reasoning_parser_cls is not None
    _wanted.set(bool(request.stream) and reads)


def _events(parser: Any, make: Any) -> Any:
    """As `make`, whose task calls the engine: the context of the handler's task does not reach it."""

    async def events(request: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        _want(parser, request)
        async with aclosing(make(request, *args, **kwargs)) as made:
            async for event in made:
                yield event

    return events


def _cut(tokenizer: Any, outputs: Outputs, params: SamplingParams) -> Outputs:
    wanted = _wanted.get() and params.output_kind == RequestOutputKind.DELTA
    return single_tokens(outputs, tokenizer, params) if wanted else outputs


async def single_tokens(outputs: Outputs, tokenizer: Any, params: SamplingParams) -> Outputs:
    """The same stream with one token in each output."""
    texts: dict[int, Any] = {}
    params = params.clone()
    params.stop = []
    async with aclosing(outputs):
        async for output in outputs:
            for number, whole in enumerate(output.outputs, 1):
                if whole.index not in texts:
                    texts[whole.index] = _detokenizer(tokenizer, output.prompt_token_ids or [], params)
                for part in _parts(whole, texts[whole.index]):
                    one = copy.copy(output)
                    one.outputs = [part]
                    one.finished = output.finished and part is whole and number == len(output.outputs)
                    yield one


def _detokenizer(tokenizer: Any, prompt: list[int], params: SamplingParams) -> Any:
    request = EngineCoreRequest("", prompt, None, params, None, 0.0, None, None, None)
    return IncrementalDetokenizer.from_new_request(tokenizer, request)


def _parts(whole: CompletionOutput, text: Any) -> Iterator[CompletionOutput]:
    """A part for each token but the last, then `whole` with what is left: also tokens whose texts do not add
    up to its text. text: the detokenizer of this output.
    """
    pieces: list[str] = []
    for token in whole.token_ids:
        text.update([token], False)
        pieces.append(text.get_next_output_text(False, True))
    for piece in pieces[:-1]:
        if not whole.text.startswith(piece):
            break
        ids, logprobs = whole.token_ids, whole.logprobs
        first = replace(whole, text=piece, token_ids=ids[:1], logprobs=logprobs and logprobs[:1])
        yield replace(first, **_UNFINISHED)
        whole.text, whole.token_ids = whole.text[len(piece) :], ids[1:]
        whole.logprobs = logprobs and logprobs[1:]
    yield whole
