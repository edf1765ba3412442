"""What a webhook has yet to be told: usage that has changed, and budgets whose lines were reached.

The usage store adds to it with each settlement; control's webhook takes from it.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from penstock.serve.tenancy.limits import NO_LIMIT
from penstock.serve.tenancy.prices import NANO
from penstock.serve.tenancy.usage import HOUR_S, Settlement, UsageKey, UsageRow

_TABLES = """
CREATE TABLE IF NOT EXISTS reached (id TEXT PRIMARY KEY, at INTEGER, type TEXT, data TEXT, is_told INTEGER);
CREATE TABLE IF NOT EXISTS told (one INTEGER PRIMARY KEY CHECK (one = 1), hour INTEGER);
"""
_AT_ONCE = 1000
_USAGE = "usage.updated"
_NAMES = ("hour", "tenant", "key", "model", "adapter", "tier")
_COUNTS = UsageRow.__struct_fields__


@dataclass(frozen=True, slots=True)
class Notice:
    """Units: at in seconds since 1970."""

    id: str
    at: int
    type: str
    data: dict[str, Any]

    def body(self) -> bytes:
        about = {"id": self.id, "object": "event", "created_at": self.at, "type": self.type}
        return json.dumps({**about, "data": self.data}, separators=(",", ":")).encode()


class Notices:
    """Of one store, under its lock. Rows are told with all that their hour has so far, so that one which is
    told again, as after a restart, changes nothing.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._connection.executescript(_TABLES)
        self._rows: set[UsageKey] | None = None  # to be told; None before a webhook was seen
        self._telling = set[UsageKey]()
        self._hour = 0  # on disk: what ended before it has been told

    def add(self, settlement: Settlement, costs: dict[str, int], begins: float, now: float) -> None:
        """The store has it. costs: of the month that begins then, by allowance."""
        if self._rows is None:
            self._rows = self._left(int(now) // HOUR_S)
        self._rows |= {key for key, _ in settlement.rows}
        if (earliest := min((key[0] for key, _ in settlement.rows), default=self._hour)) < self._hour:
            self._keep(earliest)
        month = f"{datetime.fromtimestamp(begins, UTC):%Y-%m}"
        for name, (soft, most, is_exhausted) in settlement.lines.items():
            spent = costs[name]
            shown = {"soft": _shown(soft), "limit": _shown(most)}
            data = {"name": name, "month": month, "spent": spent / NANO, **shown}
            for kind, line, is_reached in (("soft_line", soft, False), ("used_up", most, is_exhausted)):
                if is_reached or spent >= line:
                    one = sha256(f"{name} {month} {kind} {line}".encode()).hexdigest()[:24]
                    self._connection.execute(
                        "INSERT OR IGNORE INTO reached VALUES (?, ?, ?, ?, 0)",
                        (f"evt_{one}", int(now), f"budget.{kind}", json.dumps(data)),
                    )

    def untold(self, now: float) -> list[Notice]:
        """Budgets before rows."""
        found = self._connection.execute(
            "SELECT id, at, type, data FROM reached WHERE NOT is_told ORDER BY at"
        )
        notices = [Notice(one, at, kind, json.loads(data)) for one, at, kind, data in found]
        rows = self._rows = (self._rows or set()) | self._telling
        if rows:
            keys = sorted(rows)[:_AT_ONCE]
            self._telling = {*keys}
            rows -= self._telling  # what is counted from here on is told again
            one = f"evt_{sha256(f'{now} {keys[0]}'.encode()).hexdigest()[:24]}"
            shown = [row for key in keys if (row := self._row(key)) is not None]
            notices.append(Notice(one, int(now), _USAGE, {"rows": shown}))
        return notices

    def told(self, notice: Notice) -> None:
        """The webhook has it. What is not, of one call of `untold`, the next one has again."""
        if notice.type != _USAGE:
            self._connection.execute("UPDATE reached SET is_told = 1 WHERE id = ?", (notice.id,))
            return
        self._telling = set()
        if (begun := min((key[0] for key in self._rows or ()), default=notice.at // HOUR_S)) > self._hour:
            self._keep(begun)

    def _left(self, hour: int) -> set[UsageKey]:
        """What an earlier process may not have told; nothing of before the first webhook."""
        found = self._connection.execute("SELECT hour FROM told").fetchone()
        self._hour = hour if found is None else found[0]
        if found is None:
            self._keep(hour)
        rows = self._connection.execute(
            f"SELECT {', '.join(_NAMES)} FROM usage WHERE hour >= ?", (self._hour,)
        )
        return {*rows}

    def _keep(self, hour: int) -> None:
        self._hour = hour
        self._connection.execute("INSERT OR REPLACE INTO told VALUES (1, ?)", (hour,))

    def _row(self, key: UsageKey) -> dict[str, Any] | None:
        where = " AND ".join(f"{name} = ?" for name in _NAMES)
        found = self._connection.execute(
            f"SELECT {', '.join(_COUNTS)} FROM usage WHERE {where}", key
        ).fetchone()
        if found is None:
            return None  # it was too old to be kept
        hour = f"{datetime.fromtimestamp(key[0] * HOUR_S, UTC):%Y-%m-%dT%H:00Z}"
        counts = dict(zip(_COUNTS, found, strict=True))
        return {**dict(zip(_NAMES, key, strict=True)), **counts, "hour": hour, "cost": counts["cost"] / NANO}


def _shown(line: int) -> float | None:
    return None if line == NO_LIMIT else line / NANO
