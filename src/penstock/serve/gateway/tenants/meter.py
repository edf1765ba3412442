"""Reads the tokens that a request took from the answer that passes by.

Engines report usage at the end of an answer. Without a report, as when it is cut off before, prompt tokens
are those of the estimate, and output tokens of a stream as many as events were relayed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.serve.tenancy.fairness import Charge, price
from penstock.serve.tenancy.keys import Grant

_USAGE = b'"usage"'
_REPORT = re.compile(rb'"usage"\s*:\s*(\{|null)')
"""Elsewhere an answer may repeat a client's `user` of that name, a field of its tools, or a token."""

_REPORT_BYTES, _BEGIN_BYTES = 1024, 32
_COUNT = re.compile(
    rb'"((?:prompt|input|completion|output|cached|cache_(?:read|creation)_input)_tokens|seconds)"\s*:\s*(\d+)'
)
"""Quotes in generated text are escaped, so that it cannot match."""

_BESIDE_INPUT = (b"cache_read_input_tokens", b"cache_creation_input_tokens")
"""Of a prompt, what Anthropic's `input_tokens` leaves out."""

_EVENT, _EVENT_END = b"data: ", b"\n\n"
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\]')


TokenCounts = tuple[int, int, int, int, int]
"""Of one request: of its prompt, of this those that were cached, of its answer; seconds of audio; images."""


@dataclass(slots=True)
class Asked:
    """What a request may take. answer_tokens: of all choices together; None where it does not say. hides:
    whether the client must not see the usage that the gateway has asked for. free: it can take neither tokens
    nor money.
    """

    prompt_tokens: int = 0
    answer_tokens: int | None = 0
    streams: bool = False
    hides: bool = False
    free: bool = False
    images: int = 0


class RequestMeter(Charge):
    """Of one request of a tenant. `stream` or `whole` gets each piece of the answer's body."""

    __slots__ = (
        *("_asked", "_events", "_found", "_tail", "adapter", "begun", "grant", "is_open", "reserved"),
        "tier",
    )

    def __init__(
        self,
        grant: Grant,
        asked: Asked,
        answer: float,
        reserved: tuple[int, int],
        begun: int,
        adapter: str,
        tier: str,
    ) -> None:
        """answer: its tokens, as expected. reserved: tokens and their cost, in the second `begun`."""
        super().__init__(grant.tenant, grant.tenants.weight, price(asked.prompt_tokens, 0, answer))
        self.grant = grant
        self.reserved = reserved
        self.begun = begun
        self.is_open = True
        self.adapter = adapter
        self.tier = tier
        self._asked = asked
        self._events = 0
        self._tail = b""
        self._found: list[bytes] = []

    def stream(self, body: bytes) -> bytes:
        """Reads a piece of a stream, of whole events. Returns what to pass on."""
        self._events += body.count(_EVENT)
        at = body.rfind(_USAGE)
        report = None
        while at >= 0 and (report := _REPORT.match(body, at)) is None:
            at = body.rfind(_USAGE, 0, at)
        if report is None or report[1] != b"{":
            return body
        self._found[1:] = [body[at : at + _REPORT_BYTES]]  # the first has a prompt, the last the answer
        return _without_event(body, at) if self._asked.hides else body

    def whole(self, body: bytes) -> bytes:
        """Reads a piece of no stream, which may end anywhere: only the last report counts."""
        piece = self._tail + body
        at = piece.rfind(_USAGE)
        report = None
        while at >= 0 and (report := _REPORT.match(piece, at)) is None:
            at = piece.rfind(_USAGE, 0, at)
        is_whole = at < 0 or len(piece) - at >= _REPORT_BYTES
        self._tail = piece[max(0, len(piece) - _BEGIN_BYTES if is_whole else at) :]
        if report is not None:
            self._found = [piece[at : at + _REPORT_BYTES]] if report[1] == b"{" else []
        return body

    def tokens(self, *, answered: bool) -> TokenCounts:
        """What the request took. answered: whether a replica has begun to work on it, and not refused it."""
        found: dict[bytes, bytes] = {}
        for report in self._found:
            found.update(_COUNT.findall(report))
        given = found.get
        text = given(b"prompt_tokens") or given(b"input_tokens")
        prompt = None if text is None else int(text) + sum(int(given(one, 0)) for one in _BESIDE_INPUT)
        output = int(given(b"completion_tokens") or given(b"output_tokens", 0))
        cached = int(given(b"cached_tokens") or given(b"cache_read_input_tokens", 0))
        seconds = int(given(b"seconds", 0))
        asked = self._asked
        images = asked.images if answered else 0
        if prompt and output:
            return prompt, cached, output, seconds, images
        if answered and not asked.free:
            if prompt is None:
                prompt = asked.prompt_tokens
            if asked.answer_tokens != 0 and not output:
                if asked.streams:
                    output = self._events
                else:  # of which nothing has been relayed, or that a replica works on in the background
                    output = min(self.reserved[0] - prompt, int(self.grant.tenants.answer_tokens))
        return prompt or 0, cached, max(0, output), seconds, images


def _without_event(body: bytes, at: int) -> bytes:
    """Without the event around `at`, if that has nothing but usage."""
    start = body.rfind(_EVENT, 0, at)
    end = body.find(_EVENT_END, at) + len(_EVENT_END)
    if start < 0 or end < len(_EVENT_END) or not _NO_CHOICES.search(body, start, end):
        return body
    return body[:start] + body[end:]
