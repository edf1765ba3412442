"""Answers as their endpoints give them, in events or as a whole; those of chats and completions are here."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from penstock.engine import Delta
from penstock.engines.sim import wire
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.tools import Function
from penstock.openai import asgi_response
from penstock.request_context import created, id_seed

Fields = dict[str, Any]
R = TypeVar("R")
G = TypeVar("G", bound=wire.Generate)

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class SimOutput:
    """One output of one request, collected from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    last: Delta = field(default_factory=lambda: Delta("", ()))


class SimAnswer(asgi_response.Answer[Delta], Generic[R]):
    """One answer, collected from its deltas. Subclasses write it as clients of their endpoint read it."""

    def __init__(
        self, request: R, chat: wire.Generate, id: str, model: str, prompts: int, options: SimOptions
    ) -> None:
        """prompts: how many the request has; each has as many outputs."""
        self.request = request
        self.function = chat.called()
        self.id = id
        self.call_id = f"call_{id_seed.get() or uuid.uuid4().hex}"
        self.model = model
        self.outputs = [SimOutput() for _ in range(prompts * (chat.n or 1))]
        self.options = options
        self.created = created.get() or int(time.time())
        self._prompts = prompts
        self._begun = False

    def add(self, delta: Delta) -> None:
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids += delta.token_ids
        output.last = delta

    def begin(self, delta: Delta) -> bytes:
        """Adds it; the events before its own: those that begin a stream, or none."""
        self.add(delta)
        begun, self._begun = self._begun, True
        return b"" if begun else self.opening()

    def opening(self) -> bytes:
        """The events that begin a stream."""
        return b""

    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompts, of all outputs, and of the prompts in the cache."""
        firsts = [output.last for output in self.outputs[:: len(self.outputs) // self._prompts]]
        read, cached = sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts)
        return read, sum(len(output.token_ids) for output in self.outputs), cached


class CompletionAnswer(SimAnswer[G]):
    """The answer to a completion."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def event(self, delta: Delta) -> bytes:
        return self.begin(delta) + self._chunk(
            [self._choice(delta.index, self.added(delta.text), delta.finish_reason)]
        )

    def closing(self) -> bytes:
        asked = self.request.stream_options
        usage = self._chunk([], usage=self._usage()) if asked and asked.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def body(self) -> Fields:
        choices = [
            self._choice(index, self.shown(output.text), output.last.finish_reason)
            for index, output in enumerate(self.outputs)
        ]
        return {**self._head(self.whole), "choices": choices, "usage": self._usage()}

    def added(self, text: str) -> Fields:
        """How a choice shows the text of one delta."""
        return {"text": text}

    def shown(self, text: str) -> Fields:
        """How a choice shows all of its text."""
        return {"text": text}

    def _choice(self, index: int, said: Fields, finish_reason: str | None) -> Fields:
        return {"index": index, **said, "logprobs": None, "finish_reason": finish_reason}

    def _chunk(self, choices: list[Fields], **more: Any) -> bytes:
        return b"data: %b\n\n" % _json({**self._head(self.chunk), "choices": choices, **more})

    def _head(self, kind: str) -> Fields:
        return {"id": self.prefix + self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> Fields:
        read, made, cached = self.counts()
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        usage = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return usage | details if self.options.enable_prompt_tokens_details else usage


class ChatAnswer(CompletionAnswer[wire.Chat]):
    """The answer to a chat: a text, or the call of a function with the text as its arguments."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        said: Fields = {"content": ""}
        if self.function:
            said = {"tool_calls": [{"index": 0, **self._call(self.function, "")}]}
        first = {"delta": {"role": "assistant", **said}}
        return b"".join(self._chunk([self._choice(i, first, None)]) for i in range(len(self.outputs)))

    def added(self, text: str) -> Fields:
        if self.function:
            return {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}}
        return {"delta": {"content": text}}

    def shown(self, text: str) -> Fields:
        said: Fields = {"content": text}
        if self.function:
            said = {"content": None, "tool_calls": [self._call(self.function, text)]}
        return {"message": {"role": "assistant", **said}}

    def _choice(self, index: int, said: Fields, finish_reason: str | None) -> Fields:
        """As in vLLM, a call of a function that the request names ends with `stop`."""
        if finish_reason == "stop" and self.request.tool_choice == "required":
            finish_reason = "tool_calls"
        return super()._choice(index, said, finish_reason)

    def _call(self, function: Function, arguments: str) -> Fields:
        named = {"name": function.name, "arguments": arguments}
        return {"id": self.call_id, "type": "function", "function": named}


def named_event(kind: str, **fields: Any) -> bytes:
    """An event that names its type, as those of Responses and Messages do."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _json({"type": kind, **fields}))
