"""OpenAI's Responses: a request is read as a chat, and its answer is one message, or one call of a function.

Nothing is stored: a request that needs an earlier response is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from penstock.engine import Delta
from penstock.engines.sim import wire
from penstock.engines.sim.events import Fields, SimAnswer, named_event
from penstock.engines.sim.tools import Function, Named, ResponseFormat, Tool
from penstock.errors import BadRequest


class Item(Struct):
    """One item of a response's input."""

    type: str | None = None
    role: str | None = None
    content: wire.Content = None
    output: wire.Content = None

    def message(self) -> wire.ChatMessage:
        """Raises: BadRequest for an item that the simulator does not read."""
        if self.type == "message" and self.role:
            return wire.ChatMessage(self.role, self.content)
        if self.type in ("function_call_output", "custom_tool_call_output"):
            return wire.ChatMessage("tool", self.output)
        if self.type in ("function_call", "custom_tool_call", "reasoning"):
            return wire.ChatMessage("assistant")
        raise BadRequest(
            f"The simulator does not read items of type '{self.type}'. It stores nothing: send messages, "
            "reasoning, and calls of tools with their outputs.",
            param="input",
        )


class SimResponse(wire.Params, kw_only=True):
    """OpenAI's Responses. The answer repeats the fields that `REPEATED` lists, with these defaults."""

    model: str | None = None
    stream: bool | None = None
    input: str | Annotated[list[Item], Meta(min_length=1)]
    max_output_tokens: wire.Positive | None = None
    instructions: str | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    service_tier: str = "auto"
    temperature: float = 1.0
    text: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None

    def chat(self) -> wire.Chat:
        """The same request as a chat. Raises: BadRequest."""
        given = [Item("message", "user", self.input)] if isinstance(self.input, str) else self.input
        items = [Item("message", "system", self.instructions), *given] if self.instructions else given
        form, choice = (self.text or {}).get("format"), self.tool_choice
        if isinstance(choice, dict):
            named = Named(Function(str(choice.get("name"))))
            choice = "auto" if choice.get("type") == "allowed_tools" else named
        return wire.Chat(
            messages=[item.message() for item in items],
            max_tokens=self.max_output_tokens,
            tools=[
                Tool(wire.convert(tool, Function)) for tool in self.tools if tool.get("type") == "function"
            ],
            tool_choice=choice,
            response_format=form and wire.convert(form, ResponseFormat),
            structured_outputs=self.structured_outputs,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )


REPEATED = SimResponse.__struct_fields__[SimResponse.__struct_fields__.index("instructions") :]


class ResponseAnswer(SimAnswer[SimResponse]):
    """The answer to a `SimResponse`."""

    _number = -1

    def opening(self) -> bytes:
        begun = self._response("in_progress", [])
        begins = self._event("created", response=begun) + self._event("in_progress", response=begun)
        begins += self._event("output_item.added", output_index=0, item=self._item("in_progress", ""))
        return begins if self.function else begins + self._content("content_part.added", part=_part(""))

    def event(self, delta: Delta) -> bytes:
        begins = self.begin(delta)
        if self.function:
            return begins + self._in_item("function_call_arguments.delta", delta=delta.text)
        return begins + self._content("output_text.delta", delta=delta.text, logprobs=[])

    def closing(self) -> bytes:
        text, whole = self.outputs[0].text, self.body()
        if self.function:
            done = {"name": self.function.name, "arguments": text}
            ends = self._in_item("function_call_arguments.done", **done)
        else:
            ends = self._content("output_text.done", text=text, logprobs=[])
            ends += self._content("content_part.done", part=_part(text))
        ends += self._event("output_item.done", output_index=0, item=whole["output"][0])
        return ends + self._event(whole["status"], response=whole)

    def body(self) -> Fields:
        status = "incomplete" if self.outputs[0].last.finish_reason == "length" else "completed"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        read, made, cached = self.counts()
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": read + made,
        }
        item = self._item("completed", self.outputs[0].text)
        return self._response(status, [item]) | {"incomplete_details": why, "usage": usage}

    def _response(self, status: str, output: list[Fields]) -> Fields:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": output,
            "background": False,
            "max_output_tokens": self.request.max_output_tokens or self.options.max_model_len,
            **{name: getattr(self.request, name) for name in REPEATED},
        }

    def _item(self, status: str, text: str) -> Fields:
        item = {"id": self._item_id(), "status": status}
        if self.function:
            called = {"call_id": self.call_id, "name": self.function.name, "arguments": text}
            return {"type": "function_call", **item, **called}
        content = [] if status == "in_progress" else [_part(text)]
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _content(self, kind: str, **fields: Any) -> bytes:
        return self._in_item(kind, content_index=0, **fields)

    def _in_item(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id(), output_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(f"response.{kind}", sequence_number=self._number, **fields)

    def _item_id(self) -> str:
        return f"{'fc' if self.function else 'msg'}_{self.id}"


def _part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
