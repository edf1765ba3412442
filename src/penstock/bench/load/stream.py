"""One answer as it comes in: which events carried text, how it ended, and by what name it failed.

Of an event only what is needed is decoded. An answer is complete when it had text, a finish reason and
`[DONE]`; anything less is a failure with a name.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import msgspec

_MOST_DETAIL = 200  # characters of what a service says about an error
_MOST_BODY = 1024 * 1024


class ChoiceDelta(msgspec.Struct):
    """A piece of an answer. Reasoning and calls of tools are tokens like any other."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """One choice of an event, of either endpoint."""

    delta: ChoiceDelta | None = None
    text: str | None = None
    finish_reason: str | None = None


class Cached(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The service's own count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Cached | None = None


class Event(msgspec.Struct):
    """What is read of an event."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(Event).decode


@dataclass(slots=True)
class Stream:
    """Reads an answer. `text` is kept only when `keep_text`, for the next turn of a conversation.

    body: of an answer that is not a stream. Times are seconds of the monotonic clock.
    """

    keep_text: bool = False
    status: int = 0
    is_stream: bool = False
    times: array[float] = field(default_factory=lambda: array("d"))
    ended_at: float = 0.0
    usage: Usage | None = None
    finish_reason: str | None = None
    done: bool = False
    detail: str = ""
    body: bytes = b""
    _pieces: list[str] = field(default_factory=list[str])
    _error: str = ""
    _rest: bytes = b""

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def head(self, status: int, content_type: bytes) -> None:
        self.status = status
        self.is_stream = status == 200 and content_type.startswith(b"text/event-stream")

    def piece(self, body: bytes, at: float) -> None:
        if not self.is_stream:
            if len(self.body) < _MOST_BODY:
                self.body += body
            return
        lines = (self._rest + body).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at)

    def end(self, at: float) -> None:
        self.ended_at = at
        if self.is_stream:
            self.piece(b"\n", at)  # some services leave the last line unfinished

    def error(self) -> str:
        """The kind of failure; empty when the answer is complete. `detail` is what the service said."""
        if self.status != 200:
            self.detail = message(self.body)
            return f"status {self.status}"
        if not self.is_stream:
            self.detail = message(self.body)
            return "not a stream"
        if self._error:
            return self._error
        if not self.done:
            return "no [DONE]"
        if self.finish_reason is None:
            return "no finish reason"
        return "" if self.times else "no text"

    def _event(self, data: bytes, at: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._error = self._error or "unreadable event"
            self.detail = self.detail or data[:_MOST_DETAIL].decode(errors="replace")
            return
        if event.error is not None:
            self._error, self.detail = "error event", message(data)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices or ():
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
            if self._has_text(choice):
                self.times.append(at)

    def _has_text(self, choice: Choice) -> bool:
        said = choice.text
        if (delta := choice.delta) is not None:
            said = delta.content
            if delta.reasoning_content or delta.reasoning or delta.tool_calls:
                return True
        if not said:
            return False
        if self.keep_text:
            self._pieces.append(said)
        return True


def message(body: bytes) -> str:
    """The sentence of an error in any of the usual forms; else the beginning of the body."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = " ".join(str(found).split())
    return text if len(text) <= _MOST_DETAIL else f"{text[:_MOST_DETAIL]} ..."
