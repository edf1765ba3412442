"""The desired state on disk: a row for each model, and one for each replica that differs from its model.

Rows outlive a crash of control and are removed when their application ends.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from pathlib import Path

import msgspec

from penstock.serve.control.state import DesiredState

log = logging.getLogger(__name__)

_TABLE = (
    "CREATE TABLE IF NOT EXISTS desired (model TEXT, replica TEXT, state BLOB, PRIMARY KEY (model, replica))"
)


def file_name(gcs_address: str, app: str, session: str) -> str:
    """An application's file. session: of the Ray cluster; earlier ones may have had the same address."""
    address = hashlib.sha256(f"{gcs_address}/{app}".encode()).hexdigest()[:24]
    return f"{address}-{hashlib.sha256(session.encode()).hexdigest()[:8]}.sqlite"


class StateStore:
    """A small SQLite file; one process at a time."""

    def __init__(self, file: Path) -> None:
        """Also removes the files of earlier clusters at this address. Without a disk it works in memory."""
        self._file = file
        try:
            self._open(file)
        except (OSError, sqlite3.Error) as error:  # followers cannot do without control
            log.error("%s: %s. The desired state is in memory only.", file, error)
            self._open(Path(":memory:"))

    def _open(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        address = self._file.name.partition("-")[0].partition(".")[0]
        for other in file.parent.glob(f"{address}*.sqlite"):
            if other != file:
                other.unlink(missing_ok=True)
        self._connection = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        self._connection.execute(_TABLE)
        rows = self._connection.execute("SELECT model, replica, state FROM desired")
        self._rows = {
            (model, replica): msgspec.json.decode(state, type=DesiredState) for model, replica, state in rows
        }

    def version(self) -> int:
        """The highest so far."""
        return max((desired.version for desired in self._rows.values()), default=0)

    def models(self) -> set[str]:
        """Models that have a desired state."""
        return {model for model, _ in self._rows}

    def get(self, model: str, replica: str = "") -> DesiredState:
        """The replica's row, else its model's, else the default."""
        return self._rows.get((model, replica)) or self._rows.get((model, "")) or DesiredState()

    def set(self, model: str, desired: DesiredState) -> None:
        """For `desired.replica`, or for the whole model: that removes the rows of its replicas."""
        with self._connection:
            self._connection.execute("BEGIN")
            if not desired.replica:
                self._connection.execute("DELETE FROM desired WHERE model = ?", (model,))
            row = model, desired.replica, msgspec.json.encode(desired)
            self._connection.execute("INSERT OR REPLACE INTO desired VALUES (?, ?, ?)", row)
        if not desired.replica:
            self._rows = {key: value for key, value in self._rows.items() if key[0] != model}
        self._rows[model, desired.replica] = desired

    def forget(self, model: str, replica: str) -> None:
        """Removes a replica's row."""
        if self._rows.pop((model, replica), None) is None:
            return
        self._connection.execute("DELETE FROM desired WHERE model = ? AND replica = ?", (model, replica))

    def close(self) -> None:
        self._connection.close()

    def remove(self) -> None:
        """For an application that has ended."""
        self._file.unlink(missing_ok=True)
