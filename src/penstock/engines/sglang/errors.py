"""Translates SGLang's errors where they differ from those of other servers."""

from __future__ import annotations

import re

from penstock.engines import foreign
from penstock.errors import BadRequest, Error

_FAULT = re.compile(r"""'loc': \(([^)]*)\), 'msg': (?:'([^']*)'|"([^"]*)")""")
_WORD = re.compile(r"'([^']*)'")


def heard(body: bytes, status: int | None = None) -> Error:
    """What an answer with this status and body means; without a status, what a stream's error event does.

    What fits no form is told with the places in SGLang's own files, and with what the request held: of that
    the fields and what is wrong with them are kept.
    """
    message, _ = foreign.said(body)
    faults = _FAULT.findall(message) if status in (400, 422) else []
    if not faults:
        return foreign.heard(body, status)
    places = [_WORD.findall(place)[1:2] for place, *_ in faults]
    told = [": ".join([*place, one or other]) for place, (_, one, other) in zip(places, faults, strict=True)]
    named = next((place[0] for place in places if place), None)
    return BadRequest(f"{'; '.join(dict.fromkeys(told))}.", **({"param": named} if named else {}))
