"""Which names look like secrets, and values without them: for `repr`, logs and error messages."""

from __future__ import annotations

import re
import typing
from typing import Any

_SECRET = re.compile(r"(TOKEN|KEY|CREDENTIALS?)_?\d*$|SECRET|PASSWORD|PASSWD", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a name looks like that of a secret (`HF_TOKEN`, `api_key`, `AWS_SECRET_ACCESS_KEY`)."""
    return bool(_SECRET.search(name))


def masked(value: Any) -> Any:
    """`value` with everything under a secret-looking name replaced by stars."""
    if isinstance(value, dict):
        entries = typing.cast("dict[Any, Any]", value)
        return {k: "**********" if is_secret(str(k)) and v else masked(v) for k, v in entries.items()}
    if isinstance(value, list):
        return [masked(item) for item in typing.cast("list[Any]", value)]
    return value
