"""Responses in OpenAI's format: stream events, as prepared bytes around each delta's text, and whole bodies.

An event costs one JSON encoding of a short text and one join, so that a load test measures the layers before
the simulator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.engine import Delta

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class EventForm:
    """The differences between chats and completions on the wire."""

    id_prefix: str
    object: str
    chunk_object: str
    before_text: bytes
    after_text: bytes


CHAT = EventForm("chatcmpl-", "chat.completion", "chat.completion.chunk", b'"delta":{"content":', b"}")
COMPLETION = EventForm("cmpl-", "text_completion", "text_completion", b'"text":', b"")


@dataclass(slots=True)
class SimOutput:
    """One output of one request, collected from its deltas."""

    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None


@dataclass(slots=True)
class SimResponse:
    """The response to one request: makes the event for each delta, or the whole body at the end."""

    form: EventForm
    request_id: str
    model: str
    outputs: list[SimOutput]
    with_details: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, delta: Delta) -> None:
        output = self.outputs[delta.index]
        output.text += delta.text
        output.tokens += len(delta.token_ids)
        output.finish_reason = delta.finish_reason
        self.prompt_tokens = delta.prompt_tokens
        self.cached_tokens = delta.cached_tokens

    def head(self) -> bytes:
        """The part that all events of one response share."""
        names = (self.form.id_prefix + self.request_id, self.form.chunk_object, self.created, self.model)
        return b'data: {"id":%b,"object":%b,"created":%b,"model":%b,' % tuple(map(_json, names))

    def opening(self, head: bytes) -> bytes:
        """Chats begin with an event per output that names the role."""
        if self.form is not CHAT:
            return b""
        role = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        return b"".join(b'%b"choices":[{"index":%d,%b' % (head, i, role) for i in range(len(self.outputs)))

    def event(self, head: bytes, delta: Delta) -> bytes:
        said = self.form.before_text + _json(delta.text) + self.form.after_text
        finish = _json(delta.finish_reason)
        rest = b'"choices":[{"index":%d,%b,"logprobs":null,"finish_reason":%b}]}\n\n'
        return head + rest % (delta.index, said, finish)

    def usage(self) -> dict[str, object]:
        made = sum(output.tokens for output in self.outputs)
        details = {"prompt_tokens_details": {"cached_tokens": self.cached_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
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
        said: dict[str, object] = {"text": output.text}
        if form is CHAT:
            said = {"message": {"role": "assistant", "content": output.text}}
        ended = {"logprobs": None, "finish_reason": output.finish_reason}
        choices.append({"index": index, **said, **ended})
    return choices
