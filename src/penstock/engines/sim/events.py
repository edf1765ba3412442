"""Responses in OpenAI's format: stream events, as prepared bytes around each delta's text, and whole bodies.

An event costs one JSON encoding of a short text and one join, so that a load test measures the layers before
the simulator.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.engine import Delta

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

    def said(self, output: SimOutput) -> dict[str, object]:
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


def calling(function: str, required: bool) -> EventForm:
    """A chat whose answer is a call of `function`. required: that was not named; only then, as in vLLM, the
    chat ends with `tool_calls`.
    """
    call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": function}}
    first = {"index": 0, **call, "function": {"name": function, "arguments": ""}}
    return replace(
        CHAT,
        opening=_json({"role": "assistant", "tool_calls": [first]}),
        before_text=b'"delta":{"tool_calls":[{"index":0,"function":{"arguments":',
        after_text=b"}}]}",
        call=call,
        ends_as="tool_calls" if required else "stop",
    )


@dataclass(slots=True)
class SimOutput:
    """One output of one request, collected from its deltas."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class SimResponse:
    """The response to one request: makes the event for each delta, or the whole body at the end."""

    form: EventForm
    request_id: str
    model: str
    outputs: list[SimOutput]
    prompts: int = 1
    with_details: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, delta: Delta) -> None:
        output = self.outputs[delta.index]
        output.text += delta.text
        output.tokens += len(delta.token_ids)
        output.finish_reason = delta.finish_reason
        output.prompt_tokens = delta.prompt_tokens
        output.cached_tokens = delta.cached_tokens

    def head(self) -> bytes:
        """The part that all events of one response share."""
        names = (self.form.id_prefix + self.request_id, self.form.chunk_object, self.created, self.model)
        return b'data: {"id":%b,"object":%b,"created":%b,"model":%b,' % tuple(map(_json, names))

    def opening(self, head: bytes) -> bytes:
        """Chats begin with an event per output that names the role."""
        if not self.form.opening:
            return b""
        first = b'"delta":%b,"logprobs":null,"finish_reason":null}]}\n\n' % self.form.opening
        return b"".join(b'%b"choices":[{"index":%d,%b' % (head, i, first) for i in range(len(self.outputs)))

    def event(self, head: bytes, delta: Delta) -> bytes:
        said = self.form.before_text + _json(delta.text) + self.form.after_text
        finish = _json(self.form.finish(delta.finish_reason))
        rest = b'"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        return head + rest % (delta.index, said, finish)

    def usage(self) -> dict[str, object]:
        made = sum(output.tokens for output in self.outputs)
        firsts = self.outputs[:: len(self.outputs) // self.prompts]  # of each prompt
        read = sum(output.prompt_tokens for output in firsts)
        details = {"prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in firsts)}}
        return {
            "prompt_tokens": read,
            "completion_tokens": made,
            "total_tokens": read + made,
            **(details if self.with_details else {}),
        }

    def usage_event(self, head: bytes) -> bytes:
        return b'%b"choices":[],"usage":%b}\n\n' % (head, _json(self.usage()))

    def body(self) -> bytes:
        """The response to a request that does not stream."""
        return _json(
            {
                "id": self.form.id_prefix + self.request_id,
                "object": self.form.object,
                "created": self.created,
                "model": self.model,
                "choices": _choices(self.form, self.outputs),
                "usage": self.usage(),
            }
        )


def _choices(form: EventForm, outputs: Sequence[SimOutput]) -> list[dict[str, object]]:
    choices: list[dict[str, object]] = []
    for index, output in enumerate(outputs):
        ended = {"logprobs": None, "finish_reason": form.finish(output.finish_reason)}
        choices.append({"index": index, **form.said(output), **ended})
    return choices
