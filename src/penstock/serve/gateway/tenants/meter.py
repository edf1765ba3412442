"""Reads the tokens that a request took from the answer that passes by.

Engines report usage at the end of an answer. Of one that is cut off before that, prompt tokens are those of
the estimate, and output tokens as many as events were relayed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.serve.tenancy.keys import Grant
from penstock.serve.tenancy.limits import Reservation

_USAGE = b'"usage"'
_REPORT = re.compile(rb'"usage"\s*:\s*\{')
_NOTHING = re.compile(rb'"usage"\s*:\s*null')
_REPORT_BYTES = 1024
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
"""Quotes in generated text are escaped, so that it cannot match."""

_EVENT, _EVENT_END, _NO_CHOICES = b"data: ", b"\n\n", b'"choices":[]'


class TokenCounts(NamedTuple):
    """Of one request. cached: of the prompt's."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


class RequestMeter:
    """Of one request of a tenant. Called with each piece of the answer's body; returns what to pass on."""

    __slots__ = (
        "_events",
        "_found",
        "_hides",
        "_prompt",
        "_streams",
        "_tail",
        "adapter",
        "grant",
        "reservation",
        "tier",
    )

    def __init__(
        self,
        grant: Grant,
        reservation: Reservation,
        prompt: int,
        *,
        streams: bool,
        hides: bool,
        adapter: str,
        tier: str,
    ) -> None:
        """prompt: the estimate. hides: whether to take out the event with the usage, which the client has not
        asked for.
        """
        self.grant = grant
        self.reservation = reservation
        self.adapter = adapter
        self.tier = tier
        self._prompt = prompt
        self._streams = streams
        self._hides = hides
        self._events = 0
        self._tail = b""
        self._found: list[bytes] = []

    def __call__(self, body: bytes) -> bytes:
        if not self._streams:
            self._look(body)
        else:
            self._events += body.count(_EVENT)
            if _USAGE in body and (at := body.rfind(_USAGE)) >= 0 and not _NOTHING.match(body, at):
                self._found.append(body[at : at + _REPORT_BYTES])
                if self._hides:
                    return _without_event(body, at)
        return body

    def _look(self, body: bytes) -> None:
        """At a piece of no stream, which may end anywhere: only the last report counts."""
        piece = self._tail + body
        at = piece.rfind(_USAGE)
        self._tail = piece[
            max(0, at if at >= 0 and len(piece) - at < _REPORT_BYTES else len(piece) - len(_USAGE)) :
        ]
        if at >= 0:
            self._found = [piece[at : at + _REPORT_BYTES]]

    def tokens(self, *, done: bool, reached: bool) -> TokenCounts:
        """done: whether the whole answer was relayed. reached: whether it was at a replica."""
        prompt = cached = output = None
        for report in self._found:
            if _REPORT.match(report):
                prompt, cached, output = (
                    _last(pattern, report, before)
                    for pattern, before in ((_PROMPT, prompt), (_CACHED, cached), (_OUTPUT, output))
                )
        if done:
            return TokenCounts(prompt or 0, cached or 0, output or 0)
        if not reached:
            return TokenCounts()
        guess = self._events if self._streams else self.guess
        return TokenCounts(self._prompt if prompt is None else prompt, cached or 0, output or guess)

    @property
    def guess(self) -> int:
        """Output tokens of an answer of which nothing has been relayed: of the tenant's usual one."""
        reserved = self.reservation.tokens - self._prompt
        return min(reserved, int(self.grant.allowances[1].answer_tokens))


def _last(pattern: re.Pattern[bytes], report: bytes, before: int | None) -> int | None:
    found = pattern.search(report)
    return before if found is None else int(found[1])


def _without_event(body: bytes, at: int) -> bytes:
    """Without the event around `at`, if that has nothing but usage."""
    start = body.rfind(_EVENT, 0, at)
    end = body.find(_EVENT_END, at) + len(_EVENT_END)
    if start < 0 or end < len(_EVENT_END) or _NO_CHOICES not in body[start:end].replace(b" ", b""):
        return body
    return body[:start] + body[end:]
