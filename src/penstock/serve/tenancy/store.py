"""The usage of all tenants on disk: a SQLite file. Call it on a thread: it blocks."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.config.schema.settings import Settings
from penstock.config.schema.tenants import span_s
from penstock.errors import BadRequest
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.prices import NANO
from penstock.serve.tenancy.usage import HOUR_S, Caps, Settlement, Totals, UsageRow

log = logging.getLogger(__name__)

DIMENSIONS = ("tenant", "key", "model", "adapter", "tier", "day", "hour")
_STORED = DIMENSIONS[:5]
_COUNTS = UsageRow.__struct_fields__
_KEEP_S = 400 * 86_400
_SOURCES_S = 7 * 86_400

_TABLES = f"""
CREATE TABLE IF NOT EXISTS usage (hour INTEGER, {", ".join(f"{name} TEXT" for name in _STORED)},
    {", ".join(f"{name} INTEGER" for name in _COUNTS)},
    PRIMARY KEY (hour, {", ".join(_STORED)})) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sources (source TEXT PRIMARY KEY, number INTEGER, at REAL) WITHOUT ROWID;
"""
_ADD = (
    f"INSERT INTO usage (hour, {', '.join((*_STORED, *_COUNTS))}) "
    f"VALUES ({', '.join('?' * (1 + len(_STORED) + len(_COUNTS)))}) "
    f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in _COUNTS)}"
)
_SHOWN = {
    "day": f"strftime('%Y-%m-%d', hour * {HOUR_S}, 'unixepoch')",
    "hour": f"strftime('%Y-%m-%dT%H:00Z', hour * {HOUR_S}, 'unixepoch')",
}


def usage_file(app_name: str) -> Path:
    """Where an application's usage is."""
    return Settings.read().cache_folder() / "usage" / f"{app_name}.sqlite"


def since_s(text: str, now: float) -> float:
    """A time in seconds since 1970: so long ago, as `7d`, or a date, in UTC. Raises: BadRequest."""
    if (span := span_s(text)) is not None:
        return now - span
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"since is {text[:40]!r}; write 7d, 12h or a date.", param="since") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


class UsageStore:
    """Safe to share between threads and processes."""

    def __init__(self, file: Path) -> None:
        """Without a disk it works in memory."""
        self._lock = threading.Lock()
        self._caps = Caps()
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open(str(file))
            file.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            log.error("%s: %s. Usage is in memory only.", file, error)
            self._open(":memory:")

    def _open(self, file: str) -> None:
        self._connection = sqlite3.connect(file, timeout=10.0, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the latest
        self._connection.executescript(_TABLES)
        columns = {row[1] for row in self._connection.execute("PRAGMA table_info(usage)")}
        for name in _COUNTS:  # that an earlier version did not count
            if name not in columns:
                self._connection.execute(f"ALTER TABLE usage ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")
        now = time.time()
        self._connection.execute("DELETE FROM usage WHERE hour < ?", (int(now - _KEEP_S) // HOUR_S,))
        self._connection.execute("DELETE FROM sources WHERE at < ?", (now - _SOURCES_S,))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def settle(self, settlement: Settlement, now: float | None = None) -> Totals:
        """Adds what the store does not have yet. now: seconds since 1970. Raises: sqlite3.Error."""
        now = time.time() if now is None else now
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                known = self._connection.execute(
                    "SELECT number FROM sources WHERE source = ?", (settlement.source,)
                ).fetchone()
                if known is None or known[0] < settlement.number:
                    rows = [(*key, *(getattr(row, name) for name in _COUNTS)) for key, row in settlement.rows]
                    self._connection.executemany(_ADD, rows)
                    self._connection.execute(
                        "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)",
                        (settlement.source, settlement.number, now),
                    )
            periods = Periods.at(now)
            tokens, costs = self._totals(periods, settlement.totals_of)
            gateways, caps = 1, {}
            if settlement.is_gateway:
                gateways, caps = self._caps.report(settlement, time.monotonic())
        return Totals(periods, tokens, gateways, caps if gateways > 1 else {}, costs)

    def _totals(
        self, periods: Periods, names: Sequence[str] | None
    ) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
        """Tokens of the day and of the month by allowance, and the month's cost."""
        if names is not None and not names:
            return {}, {}
        tenants = None if names is None else sorted({name.partition("/")[0] for name in names})
        some = "" if tenants is None else f" AND tenant IN ({', '.join('?' * len(tenants))})"
        day, month = periods.day * 24, int(periods.month_begins) // HOUR_S
        found, costs = dict[str, tuple[int, int]](), Counter[str]()
        for tenant, key, today, in_month, cost in self._connection.execute(
            "SELECT tenant, key, SUM((hour >= ?) * (prompt_tokens + output_tokens)), "
            "SUM(prompt_tokens + output_tokens), SUM(cost) FROM usage WHERE hour >= ? AND hour < ?"
            + some
            + " GROUP BY tenant, key",
            (day, month, int(periods.month_ends) // HOUR_S, *(tenants or ())),
        ):
            for name in (tenant, f"{tenant}/{key}"):
                before = found.get(name, (0, 0))
                found[name] = before[0] + today, before[1] + in_month
                costs[name] += cost
        if names is not None:
            return {name: found.get(name, (0, 0)) for name in names}, {name: costs[name] for name in names}
        return found, dict(costs)

    def usage(self, by: Sequence[str], since: float, until: float | None = None) -> list[dict[str, Any]]:
        """Sums over hours from `since` on, by some of `DIMENSIONS`. Unlike in rows, `cost` is in units.

        Raises: BadRequest.
        """
        if unknown := [name for name in by if name not in DIMENSIONS]:
            raise BadRequest(f"by names {unknown[0][:40]!r}; there are {', '.join(DIMENSIONS)}.", param="by")
        groups = [_SHOWN.get(name, name) for name in by]
        columns = [f"{group} AS '{name}'" for group, name in zip(groups, by, strict=True)]
        sums = [f"COALESCE(SUM({name}), 0) AS {name}" for name in _COUNTS]
        group = f" GROUP BY {', '.join(groups)} ORDER BY {', '.join(groups)}" if by else ""
        end = time.time() if until is None else until
        with self._lock:
            cursor = self._connection.execute(
                f"SELECT {', '.join([*columns, *sums])} FROM usage WHERE hour >= ? AND hour < ?{group}",
                (int(since) // HOUR_S, int(end) // HOUR_S + 1),
            )
            names = [column[0] for column in cursor.description]
            found = [dict[str, Any](zip(names, row, strict=True)) for row in cursor]
        return [{**row, "cost": row["cost"] / NANO} for row in found]
