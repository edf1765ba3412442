"""How arguments travel as JSON to the process that asks vLLM. Imports nothing of vLLM."""

from __future__ import annotations

import json

_OPAQUE = "__opaque__"


def to_json(value: object) -> str:
    """JSON in which a mapping stands for each Python object: such values are not looked into."""
    return json.dumps(value, default=lambda thing: {_OPAQUE: type(thing).__name__})


def is_opaque(value: object) -> bool:
    """Whether a Python object is somewhere in this value, which came from JSON."""
    return f'"{_OPAQUE}"' in json.dumps(value)
