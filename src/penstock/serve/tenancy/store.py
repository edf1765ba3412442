"""The usage of all tenants on disk: a SQLite file. Call it on a thread: it blocks."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.config.schema.settings import Settings, service_name
from penstock.config.schema.tenants import span_s
from penstock.errors import BadRequest
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.notices import Notice, Notices
from penstock.serve.tenancy.usage import HOUR_S, Caps, ServedElsewhere, Settlement, Totals, UsageRow

log = logging.getLogger(__name__)

DIMENSIONS = ("tenant", "key", "model", "adapter", "tier", "day", "hour")
_STORED = DIMENSIONS[:5]
_COUNTS = UsageRow.__struct_fields__
_KEEP_S = 400 * 86_400
_SOURCES_S = 7 * 86_400
_SAME_S = 5.0
_SHOWN_CHANGES = 1000
_LOCKED_S, _STILL_LOCKED_S = 10.0, 0.5  # how long to wait for a file that another process keeps locked

_TABLES = f"""
CREATE TABLE IF NOT EXISTS usage (hour INTEGER, {", ".join(f"{name} TEXT" for name in _STORED)},
    {", ".join(f"{name} INTEGER" for name in _COUNTS)},
    PRIMARY KEY (hour, {", ".join(_STORED)})) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sources (source TEXT PRIMARY KEY, number INTEGER, at REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audit (number INTEGER PRIMARY KEY, at REAL, who TEXT, what TEXT);
CREATE TRIGGER IF NOT EXISTS audit_is_not_changed BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END;
CREATE TRIGGER IF NOT EXISTS audit_is_not_deleted BEFORE DELETE ON audit
    BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END;
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


def usage_file(app_name: str, port: int | None) -> Path:
    """Where a service's usage is. port: the gateway's own, if it has one."""
    settings = Settings.read()
    usage = os.path.expanduser(settings.usage) if settings.usage else settings.cache_folder() / "usage"
    return Path(usage) / f"{service_name(app_name, port)}.sqlite"


def since_s(text: str, now: float, param: str = "since") -> float:
    """A time in seconds since 1970: so long ago, as `7d`, or a date, in UTC. Raises: BadRequest."""
    if (span := span_s(text)) is not None:
        return now - span
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequest(f"{param} is {text[:40]!r}; write 7d, 12h or a date.", param=param) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def is_locked(error: Exception) -> bool:
    """Whether another process keeps an SQLite file locked."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY  # or one of its kinds


class UsageStore:
    """Safe to share between threads and processes."""

    def __init__(self, file: Path) -> None:
        """Without a disk it works in memory. It takes nothing while another process has the file locked."""
        self._lock = threading.Lock()
        self._caps, self._served = Caps(), ServedElsewhere()
        self._state: tuple[Periods, Any] | None = None
        self._sums: dict[str, tuple[int, int, int]] = {}  # as of this state, by allowance
        self._settlements = 0
        self._changed: dict[str, int] = {}  # by allowance, in which settlement
        self._heard: dict[str, int] = {}  # by source, until which settlement
        self._locked: Path | None = None
        """The file, while another process keeps it locked."""
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open(str(file), _LOCKED_S)
            file.chmod(0o600)
        except (OSError, sqlite3.Error) as error:
            self._open(":memory:")
            if is_locked(error):
                self._locked = file
                log.error("%s: %s. Usage is kept by gateways until the file is free.", file, error)
            else:
                log.error("%s: %s. Usage is in memory only.", file, error)

    def _take_file(self) -> None:
        """Raises: sqlite3.Error while another process keeps it locked."""
        if self._locked is not None:
            try:
                self._open(str(self._locked), _STILL_LOCKED_S)
            except sqlite3.Error:
                self._open(":memory:")
                raise
            self._locked = None

    def _open(self, file: str, limit_s: float = 0.0) -> None:
        self._connection = sqlite3.connect(
            file, timeout=limit_s, isolation_level=None, check_same_thread=False
        )
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the machine may lose the latest
        self._connection.executescript(_TABLES)
        columns = {row[1] for row in self._connection.execute("PRAGMA table_info(usage)")}
        for name in _COUNTS:  # that an earlier version did not count
            if name not in columns:
                self._connection.execute(f"ALTER TABLE usage ADD COLUMN {name} INTEGER NOT NULL DEFAULT 0")
        self._notices = Notices(self._connection)
        now = time.time()
        self._connection.execute("DELETE FROM usage WHERE hour < ?", (int(now - _KEEP_S) // HOUR_S,))
        self._connection.execute("DELETE FROM sources WHERE at < ?", (now - _SOURCES_S,))

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def settle(self, settlement: Settlement, now: float | None = None) -> Totals:
        """Adds what the store does not have yet. now: seconds since 1970. Raises: sqlite3.Error."""
        now = time.time() if now is None else now
        periods = Periods.at(now)
        with self._lock:
            self._take_file()
            self._settlements += 1
            self._connection.execute("BEGIN IMMEDIATE")
            with self._connection:
                self._look(periods)
                known = self._connection.execute(
                    "SELECT number FROM sources WHERE source = ?", (settlement.source,)
                ).fetchone()
                is_new = known is None or known[0] < settlement.number
                if is_new:
                    rows = [(*key, *(getattr(row, name) for name in _COUNTS)) for key, row in settlement.rows]
                    self._connection.executemany(_ADD, rows)
                    for who, what in settlement.changes:
                        self._note(who, what, now, _SAME_S)
                    self._connection.execute(
                        "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)",
                        (settlement.source, settlement.number, now),
                    )
            month = range(int(periods.month_begins) // HOUR_S, int(periods.month_ends) // HOUR_S)
            for (hour, tenant, key, *_), row in settlement.rows if is_new else ():
                if hour in month:
                    tokens = row.prompt_tokens + row.output_tokens
                    self._add(tenant, key, tokens if hour // 24 >= periods.day else 0, tokens, row.cost)
            if is_new and settlement.webhook:
                costs = {name: self._sums.get(name, (0, 0, 0))[2] for name in settlement.lines}
                self._notices.add(settlement, costs, periods.month_begins, now)
            found = {name: self._sums.get(name, (0, 0, 0)) for name in self._asked(settlement, is_new)}
            gateways, caps, served, clock = 1, {}, [], time.monotonic()
            if settlement.is_gateway:
                gateways, caps = self._caps.report(settlement, clock)
                served = self._served.report(settlement, self._caps.sources) if is_new else []
        tokens = {name: (day, month) for name, (day, month, _) in found.items()}
        costs = {name: cost for name, (_, _, cost) in found.items()}
        caps, is_new = caps if gateways > 1 else {}, self._caps.is_new(clock)
        return Totals(periods, tokens, gateways, caps, costs, served, is_new)

    def untold(self) -> list[Notice]:
        """What the webhook is to be told next. Raises: sqlite3.Error."""
        with self._lock:
            return self._notices.untold(time.time())

    def told(self, notice: Notice) -> None:
        """The webhook has it. Raises: sqlite3.Error."""
        with self._lock:
            self._notices.told(notice)

    def note(self, who: str, what: str) -> None:
        """Adds to the audit log."""
        try:
            with self._lock:
                self._take_file()
                self._note(who, what, time.time(), 0.0)
        except sqlite3.Error as error:  # what it is about has been done
            log.error("The audit log lacks '%s: %s': %s", who, what, error)

    def _note(self, who: str, what: str, now: float, same_s: float) -> None:
        """same_s: in which the same, as several gateways notice it, stands there once."""
        self._connection.execute(
            "INSERT INTO audit (at, who, what) SELECT ?1, ?2, ?3 "
            "WHERE NOT EXISTS (SELECT 1 FROM audit WHERE at > ?1 - ?4 AND who = ?2 AND what = ?3)",
            (now, who, what, same_s),
        )

    def audit(self) -> list[dict[str, Any]]:
        """The newest entries first. Units: at in seconds since 1970."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT at, who, what FROM audit ORDER BY number DESC LIMIT ?", (_SHOWN_CHANGES,)
            )
            return [{"at": at, "who": who, "what": what} for at, who, what in rows]

    def _asked(self, settlement: Settlement, is_new: bool) -> Iterable[str]:
        """Allowances whose totals a process needs: what it names, and what others have changed since its last
        answer. All, where that answer may not have come.
        """
        since = self._heard.get(settlement.source)
        self._heard[settlement.source] = self._settlements
        if settlement.totals_of is None or since is None or not is_new:
            return self._sums
        return {*settlement.totals_of, *(name for name, at in self._changed.items() if at > since)}

    def _look(self, periods: Periods) -> None:
        """Sums up what is on disk, if that is new: another day, or what another process has written."""
        state = periods, self._connection.execute("PRAGMA data_version").fetchone()
        if state == self._state:
            return
        self._sums = {}
        hours = periods.day * 24, *(int(at) // HOUR_S for at in (periods.month_begins, periods.month_ends))
        for row in self._connection.execute(
            "SELECT tenant, key, SUM((hour >= ?) * (prompt_tokens + output_tokens)), "
            "SUM(prompt_tokens + output_tokens), SUM(cost) FROM usage WHERE hour >= ? AND hour < ? "
            "GROUP BY tenant, key",
            hours,
        ):
            self._add(*row)
        self._state = state

    def _add(self, tenant: str, key: str, today: int, month: int, cost: int) -> None:
        """Tokens of the day and of the month, and the month's cost, to those of a key and its tenant."""
        for name in (tenant, f"{tenant}/{key}"):
            before = self._sums.get(name, (0, 0, 0))
            self._sums[name] = before[0] + today, before[1] + month, before[2] + cost
            self._changed[name] = self._settlements

    def usage(self, by: Sequence[str], since: float, until: float | None = None) -> list[dict[str, Any]]:
        """Sums over hours that begin from `since` on, or contain it, and before `until`, by some of
        `DIMENSIONS`. Raises: BadRequest.
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
                (int(since) // HOUR_S, math.ceil(end / HOUR_S)),
            )
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]
