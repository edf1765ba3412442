"""The desired state of all models of one application, in memory and on disk.

Every change gets a version and wakes who waits. On disk are a row for each model, and one for each replica
that differs from its model. They outlive a crash of control and are removed when their application ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import Unavailable
from penstock.serve.control import operations
from penstock.serve.control.state import FOLLOW_S, DesiredState
from penstock.serve.tenancy.store import is_locked

log = logging.getLogger(__name__)

_LOCKED_S = 5.0  # how long to wait for a file that another process keeps locked

_TABLE = (
    "CREATE TABLE IF NOT EXISTS desired (model TEXT, replica TEXT, state BLOB, PRIMARY KEY (model, replica))"
)


class Signal:
    """Wakes all tasks that wait for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.sent = 0
        self.closed = False

    def close(self) -> None:
        """For the end of control: links end, too."""
        self.closed = True
        self.send()

    def send(self) -> None:
        self.sent += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, condition: Callable[[], Any], limit_s: float) -> None:
        """Returns once `condition` is true, or after `limit_s`. Looks at each signal, and each `FOLLOW_S`."""
        deadline = time.monotonic() + limit_s
        while not condition() and (now := time.monotonic()) < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(deadline - now, FOLLOW_S)):
                    await self._event.wait()


def file_name(cluster: str, app: str, session: str) -> str:
    """An application's file. cluster: its name or address, which earlier sessions may have had, too."""
    address = hashlib.sha256(f"{cluster}/{app}".encode()).hexdigest()[:24]
    return f"{address}-{hashlib.sha256(session.encode()).hexdigest()[:8]}.sqlite"


class DesiredStates:
    """By model and replica. The file is a small SQLite database; one process at a time."""

    def __init__(self, file: Path) -> None:
        """Also removes the files of earlier clusters at this address. Without a disk it works in memory."""
        self._file = file
        self._locked = False
        self.changed = Signal()
        """Sent at each change here, and of what followers report."""
        try:
            self._open(file)
        except (OSError, sqlite3.Error) as error:  # followers cannot do without control
            self._locked = is_locked(error)
            until = " until the file is free" if self._locked else ""
            log.error("%s: %s. The desired state is in memory only%s.", file, error, until)
            self._open(Path(":memory:"))
        self.version = max((desired.version for desired in self._rows.values()), default=0)
        """The highest so far."""

    def check(self) -> None:
        """Raises: Unavailable once the file that another process kept locked is free. It has what this store
        lacks, such as the fleet: the next control goes on with that.
        """
        if self._locked:
            with suppress(sqlite3.Error), closing(sqlite3.connect(self._file, timeout=0)) as found:
                found.execute("SELECT 1 FROM desired")
                raise Unavailable(f"{self._file} is free again: control restarts, and reads it.")

    def _open(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        address = self._file.name.partition("-")[0].partition(".")[0]
        for other in file.parent.glob(f"{address}*.sqlite"):
            if other != file:
                other.unlink(missing_ok=True)
        # Also for what else control stores.
        self.connection = sqlite3.connect(
            file, timeout=_LOCKED_S, isolation_level=None, check_same_thread=False
        )
        if file.exists():
            file.chmod(0o600)  # the fleet may hold keys
        self.connection.execute(_TABLE)
        rows = self.connection.execute("SELECT model, replica, state FROM desired")
        self._rows = {
            (model, replica): msgspec.json.decode(state, type=DesiredState) for model, replica, state in rows
        }

    def get(self, model: str, replica: str = "") -> DesiredState:
        """The replica's row, else its model's, else the default."""
        return self._rows.get((model, replica)) or self._rows.get((model, "")) or DesiredState()

    def change(self, model: str, replica: str, operation: str, arguments: Any) -> DesiredState:
        """Applies an operation. replica: "" for the whole model. arguments: as returned by `parse`."""
        return self.set(model, operations.apply(self.get(model, replica), operation, arguments, replica))

    def set(self, model: str, wanted: DesiredState) -> DesiredState:
        """For `wanted.replica`, or for the whole model. Returns the same with its version."""
        desired = msgspec.structs.replace(wanted, version=self.version + 1)
        self._write(model, desired)
        self.changed.send()
        return desired

    def recover(self, model: str, replica: str, reported: DesiredState) -> None:
        """Takes over what a replica knows and this store lacks: control may have moved to another node."""
        if reported.version > self.get(model, replica).version:
            log.warning("%s: taking over version %d of the desired state", model, reported.version)
            self._write(model, reported)

    def _write(self, model: str, desired: DesiredState) -> None:
        """What is for the whole model removes the rows of its replicas. On a full disk it holds all the same:
        replicas report it to the next control.
        """
        try:
            with self.connection:
                self.connection.execute("BEGIN")
                if not desired.replica:
                    self.connection.execute("DELETE FROM desired WHERE model = ?", (model,))
                row = model, desired.replica, msgspec.json.encode(desired)
                self.connection.execute("INSERT OR REPLACE INTO desired VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            log.error("%s: the desired state is not stored: %s", model, error)
        if not desired.replica:
            self._rows = {key: value for key, value in self._rows.items() if key[0] != model}
        self._rows[model, desired.replica] = desired
        self.version = max(self.version, desired.version)

    def forget(self, model: str, replica: str | None = None) -> None:
        """Removes the row of a replica that is gone; without one, all rows of a model that is gone."""
        for row in [one for one in self._rows if one[0] == model and replica in (None, one[1])]:
            del self._rows[row]
            with suppress(sqlite3.Error):  # it concerns nobody any more
                self.connection.execute("DELETE FROM desired WHERE model = ? AND replica = ?", row)

    def routes(self) -> dict[str, str]:
        """The application that answers for a model, by model, where it is not the gateway's own."""
        routes = {model: self.get(model).application for model, _ in self._rows}
        return {model: application for model, application in routes.items() if application}

    def close(self) -> None:
        self.connection.close()

    def remove(self) -> None:
        """For an application that has ended."""
        self._file.unlink(missing_ok=True)
