"""Outputs of vLLM's core as they come to its parsers, and what a client sees of them. No engine runs."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

from penstock.engines.vllm.frontend import token_text

_TYPES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": _TYPES}}}
    for name in ("get_weather", "get_time")
]
REQUEST = ChatCompletionRequest.model_validate(
    {
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "tools": TOOLS,
        "model": "any",
        "stream": True,
    }
)
PROMPT = [1]


@contextmanager
def stops_held() -> Iterator[None]:
    """Holds stop strings as an engine with this reasoning parser does."""
    own = RequestState.from_new_request
    parsers = SimpleNamespace(reasoning_parser="deepseek_r1")
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="any"))
    token_text.hold_stops(SimpleNamespace(structured_outputs_config=parsers, model_config=model))
    try:
        yield
    finally:
        RequestState.from_new_request = own


class Stream:
    """What the client sees of one output."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._calls: dict[int, list[str]] = {}
        self._reasoning = self._content = ""
        self._reasons: list[Any] = []

    def take(self, text: str, ids: list[int], finish_reason: str | None, stop_reason: Any = None) -> None:
        delta = self._parser.parse_delta(text, ids, REQUEST, PROMPT, finished=finish_reason is not None)
        for call in (delta and delta.tool_calls) or ():
            name, arguments = self._calls.setdefault(call.index, ["", ""])
            self._calls[call.index] = [
                name + (call.function.name or ""),
                arguments + (call.function.arguments or ""),
            ]
        self._reasoning += (delta and delta.reasoning) or ""
        self._content += (delta and delta.content) or ""
        if finish_reason is not None:
            self._reasons = [
                "tool_calls" if self._calls and finish_reason == "stop" else finish_reason,
                stop_reason,
            ]

    @property
    def seen(self) -> list[Any]:
        return [self._calls, self._reasoning, self._content, *self._reasons]


async def outputs(
    tokenizer: Any, ids: list[int], sizes: Iterator[int], reasons: bool = False, **params: Any
) -> AsyncGenerator[Any, None]:
    """vLLM's outputs of these tokens, which come from the core, and are read, in groups of these sizes.

    reasons: whether the request has a reasoning parser.
    """
    given = SamplingParams(output_kind=RequestOutputKind.DELTA, skip_special_tokens=False, **params)
    request = EngineCoreRequest("a", PROMPT, None, given, None, 0.0, None, None, None, external_req_id="a")
    request.reasoning_parser_kwargs = {} if reasons else None
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "a")
    processor = OutputProcessor(tokenizer, log_stats=False)
    processor.add_request(request, None, queue=queue)
    begin = 0
    while begin < len(ids) and processor.has_unfinished_requests():
        for _ in range(next(sizes)):  # messages of the core until the stream is read again
            size = next(sizes)
            end = FinishReason.STOP if begin + size >= len(ids) else None
            if begin < len(ids) and processor.has_unfinished_requests():
                processor.process_outputs(
                    [EngineCoreOutput("a", ids[begin : begin + size], finish_reason=end)]
                )
            begin += size
        if (output := queue.get_nowait()) is not None:
            yield output


def sizes(most: int, seed: int) -> Iterator[int]:
    """Of groups with up to `most` tokens."""
    chosen = random.Random(seed * most)
    while True:
        yield chosen.randint(1, most)
