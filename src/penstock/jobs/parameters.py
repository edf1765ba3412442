"""What clients send beside a file: queries of lists, and the times after which files expire."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from penstock.errors import BadRequest
from penstock.jobs.records import BatchRecord, FileRecord

_HOUR_S, _DAY_S = 3600, 86_400
KEEP_S = 30 * _DAY_S
"""How long files are kept by default, and at most."""

_LONGEST_WINDOW_S = 30 * _DAY_S
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNITS = {"m": 60, "h": _HOUR_S, "d": _DAY_S}


_Listed = TypeVar("_Listed", FileRecord, BatchRecord)


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list. after: the id before its first one."""

    limit: int
    after: str | None = None
    ascending: bool = False

    @classmethod
    def of(cls, query: Mapping[str, str], *, most: int, default: int) -> Page:
        """Raises: BadRequest."""
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise BadRequest(f"order is {order[:40]!r}; it must be 'asc' or 'desc'.", param="order")
        text = query.get("limit", str(default))
        limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
        if not 1 <= limit <= most:
            raise BadRequest(f"limit is {text[:40]!r}; it must be from 1 to {most:,}.", param="limit")
        return cls(limit, query.get("after") or None, order == "asc")

    def cut(
        self, records: Mapping[str, _Listed], keep: Callable[[_Listed], bool] = lambda record: True
    ) -> tuple[list[_Listed], bool]:
        """Its records, of those to keep, and whether more follow."""
        ids = sorted(records)
        if self.ascending:
            ids = ids[bisect_right(ids, self.after or "") :]
        else:
            ids = ids[: len(ids) if self.after is None else bisect_left(ids, self.after)]
            ids.reverse()
        kept = (record for one in ids if keep(record := records[one]))
        found = list(islice(kept, self.limit + 1))
        return found[: self.limit], len(found) > self.limit


def shown(found: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page in OpenAI's form."""
    first, last = (found[0]["id"], found[-1]["id"]) if found else (None, None)
    return {"object": "list", "data": found, "first_id": first, "last_id": last, "has_more": has_more}


def expires_after_s(anchor: object, seconds: object, param: str) -> int:
    """How long a file is kept. param: the field's name, for errors. Raises: BadRequest."""
    if anchor != "created_at":
        raise BadRequest(f"{param}.anchor must be 'created_at'.", param=param)
    text = str(seconds)
    given = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if isinstance(seconds, bool) or not _HOUR_S <= given <= KEEP_S:
        raise BadRequest(
            f"{param}.seconds is {text[:40]!r}; it must be from {_HOUR_S} (an hour) to {KEEP_S} (30 days).",
            param=param,
        )
    return given


def window_s(text: str) -> int:
    """Seconds of a completion window. Raises: BadRequest."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise BadRequest(
            f"completion_window is {text[:40]!r}; write '24h', or another number of minutes, hours or days "
            "up to 30 days, as in '90m' and '7d'.",
            param="completion_window",
        )
    return seconds
