"""Translates SGLang's errors where they differ from those of other servers."""

from __future__ import annotations

import re

from penstock.engines import foreign
from penstock.errors import BadRequest, Error

_FAULT = re.compile(r"""'loc': \(([^)]*)\), 'msg': (?:'([^']*)'|"([^"]*)")""")
_WORD = re.compile(r"'([^']*)'")


def heard(body: bytes, status: int | None = None) -> Error:
    """As `foreign.heard`, for responses of SGLang.

    SGLang reports invalid fields with places in its own files and with the request's values; only the names
    of the fields and what is wrong with them are passed on.
    """
    message, _ = foreign.said(body)
    faults = _FAULT.findall(message) if status in (400, 422) else []
    if not faults:
        return foreign.heard(body, status)
    places = [_WORD.findall(place)[1:2] for place, *_ in faults]
    said = [": ".join([*place, one or other]) for place, (_, one, other) in zip(places, faults, strict=True)]
    named = next((place[0] for place in places if place), None)
    return BadRequest(f"{'; '.join(dict.fromkeys(said))}.", **({"param": named} if named else {}))
