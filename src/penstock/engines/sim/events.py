"""Responses in OpenAI's format: stream events, as prepared bytes around each delta's text, and whole bodies.

An event costs one JSON encoding of a short text and one join, so that a load test measures the layers before
the simulator.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engine import Delta
from penstock.engines.sim import wire

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EventForm:
    """The differences between chats, chats that call a tool, and completions on the wire.

    opening: the delta of the first event of each output; empty without such an event.
    call: the tool call of which the text is the arguments. ends_as: what `stop` is then called.
    """

    id_prefix: str
    object: str
    chunk_object: str
    opening: bytes
    before_text: bytes
    after_text: bytes
    call: dict[str, Any] | None = None
    ends_as: str = "stop"

    def shown(self, output: SimOutput) -> dict[str, object]:
        """An output's own fields in a response's body."""
        if not self.opening:
            return {"text": output.text}
        if self.call is None:
            return {"message": {"role": "assistant", "content": output.text}}
        return {"message": {"role": "assistant", "content": None, "tool_calls": [self._called(output.text)]}}

    def finish(self, reason: str | None) -> str | None:
        return self.ends_as if reason == "stop" else reason

    def _called(self, arguments: str) -> dict[str, Any]:
        assert self.call is not None
        return {**self.call, "function": {**self.call["function"], "arguments": arguments}}


CHAT = EventForm(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    b'{"role":"assistant","content":""}',
    b'"delta":{"content":',
    b"}",
)
COMPLETION = EventForm("cmpl-", "text_completion", "text_completion", b"", b'"text":', b"")


def _chat(request: wire.Chat) -> EventForm:
    """A chat, or one whose answer is a call. As in vLLM, one that names its function ends with `stop`."""
    if (function := request.called()) is None:
        return CHAT
    call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": function.name}}
    first = {"index": 0, **call, "function": {"name": function.name, "arguments": ""}}
    return replace(
        CHAT,
        opening=_json({"role": "assistant", "tool_calls": [first]}),
        before_text=b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":',
        after_text=b"}}]}",
        call=call,
        ends_as="tool_calls" if request.tool_choice == "required" else "stop",
    )


@dataclass(slots=True)
class SimOutput:
    """One output of one request, collected from its deltas."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None


class Choices:
    """The answer to a chat or a completion, collected from deltas."""

    def __init__(
        self, request: wire.Chat | wire.Completion, model: str, request_id: str, prompts: int, details: bool
    ) -> None:
        """prompts: how many the request has; each has as many outputs. details: whether usage has them."""
        self._outputs = [SimOutput() for _ in range(prompts * (request.n or 1))]
        self._prompts, self._details = prompts, details
        self._with_usage = request.stream_options is not None and request.stream_options.include_usage
        self._form = form = COMPLETION if isinstance(request, wire.Completion) else _chat(request)
        self._id, self._model, self._created = form.id_prefix + request_id, model, int(time.time())
        names = (self._id, form.chunk_object, self._created, model)
        self._head = b'data: {"id":%b,"object":%b,"created":%b,"model":%b,' % tuple(map(_json, names))

    def add(self, delta: Delta) -> None:
        output = self._outputs[delta.index]
        output.text += delta.text
        output.tokens += len(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.prompt_tokens = delta.prompt_tokens
        output.cached_tokens = delta.cached_tokens

    def opening(self) -> bytes:
        """Chats begin with an event per output that names the role."""
        if not self._form.opening:
            return b""
        first = b'"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % self._form.opening
        outputs = range(len(self._outputs))
        return b"".join(b'%b"choices":[{"index":%d,%b' % (self._head, i, first) for i in outputs)

    def event(self, delta: Delta) -> bytes:
        said = self._form.before_text + _json(delta.text) + self._form.after_text
        finish = _json(self._form.finish(delta.finish_reason))
        rest = b'"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        return self._head + rest % (delta.index, said, finish)

    def closing(self) -> bytes:
        usage = b'%b"choices":[],"usage":%b}\n\n' % (self._head, _json(self._usage()))
        return (usage if self._with_usage else b"") + DONE

    def _usage(self) -> dict[str, object]:
        firsts = self._outputs[:: len(self._outputs) // self._prompts]  # of each prompt
        read, cached = (sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts))
        made = sum(output.tokens for output in self._outputs)
        details = {"prompt_tokens_details": {"cached_tokens": cached}} if self._details else {}
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made, **details}

    def body(self) -> bytes:
        form = self._form
        choices: list[dict[str, object]] = []
        for index, output in enumerate(self._outputs):
            ended = {"logprobs": None, "finish_reason": form.finish(output.finish_reason)}
            choices.append({"index": index, **form.shown(output), **ended})
        return _json(
            {
                "id": self._id,
                "object": form.object,
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": self._usage(),
            }
        )
