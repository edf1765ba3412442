"""Anthropic's Messages: a request is read as a chat, and its answer is one text, or one use of a tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from penstock.engine import Delta
from penstock.engines.sim import tokenizer, wire
from penstock.engines.sim.events import Fields, SimAnswer, named_event
from penstock.engines.sim.tools import Function, Named, ResponseFormat, Tool

_BILLING = "x-anthropic-billing-header"
_RESULT = "tool_result"


class MessageTool(Struct):
    name: str
    input_schema: dict[str, Any]


class MessageToolChoice(Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""


class OutputConfig(Struct, frozen=True):
    format: ResponseFormat | None = None


class SimMessage(Struct, kw_only=True):
    """Anthropic's Messages."""

    model: str | None = None
    stream: bool | None = None
    messages: wire.Messages
    max_tokens: wire.Positive
    system: wire.Content = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig = OutputConfig()
    tools: list[MessageTool] = []
    tool_choice: MessageToolChoice = MessageToolChoice("auto")

    def chat(self) -> wire.Chat:
        """The same request as a chat."""
        given = [wire.ChatMessage("system", self.system), *self.messages] if self.system else self.messages
        choices: Mapping[str, Any] = {"any": "required", "tool": Named(Function(self.tool_choice.name))}
        return wire.Chat(
            messages=[one for message in given for one in _split(message)],
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=[Tool(Function(tool.name, tool.input_schema)) for tool in self.tools],
            tool_choice=choices.get(self.tool_choice.type),
            response_format=self.output_config.format,
        )


class MessageAnswer(SimAnswer[SimMessage]):
    """The answer to a `SimMessage`."""

    def opening(self) -> bytes:
        message = {**self._message([]), "usage": {**self._usage(), "output_tokens": 0}}
        block = named_event("content_block_start", index=0, content_block=self._block(""))
        return named_event("message_start", message=message) + block

    def event(self, delta: Delta) -> bytes:
        added = {"type": "text_delta", "text": delta.text}
        if self.function:
            added = {"type": "input_json_delta", "partial_json": delta.text}
        return self.begin(delta) + named_event("content_block_delta", index=0, delta=added)

    def closing(self) -> bytes:
        ends = named_event("content_block_stop", index=0)
        ends += named_event("message_delta", delta=self._ending(), usage=self._usage())
        return ends + named_event("message_stop")

    def body(self) -> Fields:
        return self._message([self._block(self.outputs[0].text)]) | self._ending()

    def _message(self, content: list[Fields]) -> Fields:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _block(self, text: str) -> Fields:
        if not self.function:
            return {"type": "text", "text": text}
        called = {"id": self.call_id, "name": self.function.name}
        return {"type": "tool_use", **called, "input": _decoded(text) or {}}

    def _ending(self) -> Fields:
        """As in vLLM: a call that is whole goes before a stop string."""
        output = self.outputs[0]
        reason, word = {"length": "max_tokens", "stop": "end_turn"}.get(output.last.finish_reason or ""), None
        if reason == "end_turn" and self.function and _decoded(output.text) is not None:
            reason = "tool_use"
        elif reason == "end_turn" and output.token_ids[-1] != tokenizer.EOS:
            text = tokenizer.decode(output.token_ids)  # its stop string, too, which is not shown
            words = [word for word in self.request.stop_sequences or () if word and word in text]
            reason, word = "stop_sequence", min(words, key=lambda word: text.find(word) + len(word))
        return {"stop_reason": reason, "stop_sequence": word}

    def _usage(self) -> dict[str, int]:
        read, made, cached = self.counts()
        if not self.options.enable_prompt_tokens_details:
            return {"input_tokens": read, "output_tokens": made}
        return {"input_tokens": read - cached, "output_tokens": made, "cache_read_input_tokens": cached}


def _split(message: wire.ChatMessage) -> list[wire.ChatMessage]:
    """As in vLLM, a result of a tool is a message of its own, before the rest of its message. Claude Code's
    line about billing is left out: it differs in each request, and would keep all from being found in the
    cache.
    """
    if not isinstance(message.content, list):
        return [message]
    parts = [part for part in message.content if not (part.text or "").startswith(_BILLING)]
    results = [wire.ChatMessage("tool", part.content) for part in parts if part.type == _RESULT]
    rest = [part for part in parts if part.type != _RESULT]
    return [*results, wire.ChatMessage(message.role, rest)] if rest else results


def _decoded(arguments: str) -> Any:
    """None for arguments that were cut."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return None
