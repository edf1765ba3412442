"""Classes of work, in the words of OpenAI's `service_tier`: which requests go before which.

`priority` goes before `default`, which is online work and all that says nothing; `flex` is batch. The gateway
reads a request's class, replicas enforce it, batch sends its rows as `flex`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from penstock.errors import BadRequest

Tier = Literal["priority", "default", "flex"]

PRIORITY: Tier = "priority"
DEFAULT: Tier = "default"
FLEX: Tier = "flex"

HEADER = "x-penstock-tier"
"""For clients that cannot set `service_tier`, and between gateway and replica. It goes before the body."""
FIELD = "service_tier"

ENGINE_PRIORITY: Mapping[str, int] = {PRIORITY: -(1 << 60), DEFAULT: 0, FLEX: 1 << 60}
"""For an engine's scheduler, which takes lower ones first. Between them: turns of tenants."""

_WORDS: Mapping[str, Tier] = {
    "auto": DEFAULT,
    "default": DEFAULT,
    "scale": DEFAULT,
    "flex": FLEX,
    "priority": PRIORITY,
    "fast": PRIORITY,  # OpenAI's other word for it
}
_ANTHROPIC: Mapping[str, Tier] = {**_WORDS, "standard_only": DEFAULT}
_MESSAGES = "/v1/messages"
_REPORTED = ("/v1/chat/completions", "/v1/completions", _MESSAGES)
_ANTHROPIC_REPORTS = {PRIORITY: "priority", DEFAULT: "standard", FLEX: "batch"}
_ABSENT = (b"", b"null")
_DATA = b"data: "


def of_body(raw: bytes | memoryview | msgspec.Raw, path: str) -> Tier | None:
    """The class that the JSON of `service_tier` names on this path; None where it names none.

    Raises: BadRequest.
    """
    text = bytes(raw)
    if text in _ABSENT:
        return None
    try:
        word = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        word = None
    words = _ANTHROPIC if path.startswith(_MESSAGES) else _WORDS
    if not isinstance(word, str) or word not in words:
        raise _unknown(FIELD, text.decode(errors="replace"), words)
    return words[word]


def of_header(value: bytes | None) -> Tier | None:
    """The class that the header names; None without it. Raises: BadRequest."""
    if value is None:
        return None
    word = value.decode("latin-1").strip().lower()
    if word not in _ANTHROPIC:
        raise _unknown(HEADER, f"'{word}'", _WORDS)
    return _ANTHROPIC[word]


def read(header: bytes | None) -> Tier:
    """The class that a gateway or batch has written into the header."""
    word = (header or b"").decode("latin-1")
    return word if word in ("priority", "flex") else DEFAULT


def is_reported(path: str) -> bool:
    """Whether responses on this path say `service_tier` only where `reported` writes it into them."""
    return path in _REPORTED


def reported(body: bytes, tier: str, path: str) -> bytes:
    """The JSON of a response, which says `service_tier`; Anthropic's says it in `usage`, in its own words.

    What is no JSON object stays as it is.
    """
    if path == _MESSAGES:
        return _with(body, ("usage",), _ANTHROPIC_REPORTS[tier])
    return _with(body, (), tier)


def reported_event(piece: bytes, tier: str, path: str) -> bytes:
    """The same for the first piece of a stream, where clients read it: in its first event with data."""
    before, found, after = piece.partition(_DATA)
    event, end, rest = after.partition(b"\n")
    if not found or not event.startswith(b"{"):
        return piece
    if path == _MESSAGES:
        event = _with(event, ("message", "usage"), _ANTHROPIC_REPORTS[tier])
    elif FIELD.encode() in event:
        event = _with(event, (), tier)
    else:  # the usual case, in a microsecond
        event = b'{"%b":"%b",' % (FIELD.encode(), tier.encode()) + event[1:]
    return before + found + event + end + rest


def _with(body: bytes | msgspec.Raw, inside: tuple[str, ...], word: str) -> bytes:
    """A JSON object that says `word` in the object that lies under the names `inside`."""
    try:
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return bytes(body)
    name, *deeper = (*inside, FIELD)
    if not deeper:
        value = msgspec.json.encode(word)
    elif name in found:
        value = _with(found[name], inside[1:], word)
    else:
        return bytes(body)
    return msgspec.json.encode({**found, name: msgspec.Raw(value)})


def _unknown(where: str, given: str, words: Mapping[str, Tier]) -> BadRequest:
    allowed = ", ".join(f"'{word}'" for word in words)
    return BadRequest(
        f"{where} is {given[:80]}; allowed are {allowed}. 'flex' is for batch; online work needs none.",
        param=FIELD,
    )
