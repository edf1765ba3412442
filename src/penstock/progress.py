"""How a replica reports its start, and its log, to the command that started it. Both sides.

The command opens a `ProgressReader` and sets its socket in the environment before it starts the workers,
which inherit it. Without it, or on another node, nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ENVIRONMENT = "_PENSTOCK_PROGRESS"
"""Not a setting: `Settings` does not check names with an underscore in front."""

LOG_ENVIRONMENT = "_PENSTOCK_LOG"
READY = "ready"
FAILED = "failed"
_MOST_BYTES = 1 << 16
_MOST_CHARACTERS = 5000  # of a note; as JSON, one may take 12 bytes


@dataclass(frozen=True, slots=True)
class Step:
    """One model's replica, process `pid`, entered `phase` at `at`; without a model, `phase` is a `note`.

    Units: at in seconds of this machine's monotonic clock, which its processes share.
    """

    model_id: str
    phase: str
    pid: int
    at: float


def report(model_id: str, phase: str) -> None:
    """Reports that this process entered `phase`: "import", "load", ..., READY, or FAILED.

    Never raises and never blocks: a model starts whether or not it is watched.
    """
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return
    if len(phase) > _MOST_CHARACTERS:
        phase = f"{phase[: _MOST_CHARACTERS - 4]} ..."
    line = json.dumps([model_id, phase, os.getpid(), time.monotonic()])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, _short(Path(path)) as address:
            sock.setblocking(False)
            sock.sendto(line.encode(), address)
    except OSError:
        return


def note(text: str) -> None:
    """Has the command say it."""
    report("", text)


def log_stream() -> TextIO:
    """The command's stderr; without a command, this process's."""
    path = os.environ.get(LOG_ENVIRONMENT)
    if path:
        with contextlib.suppress(OSError):
            return open(path, "a", buffering=1, encoding="utf-8")
    return sys.stderr


@contextlib.contextmanager
def _short(path: Path) -> Generator[str]:
    """The address of the socket at `path`: of at most 107 bytes, however deep its folder is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class ProgressReader:
    """The receiving side: a socket at `path`, for `select` and for `read`. `close` removes the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.setblocking(False)
        with _short(path) as address:
            self._sock.bind(address)

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self) -> list[Step]:
        """Every step that has arrived since the last call, in order."""
        steps: list[Step] = []
        while True:
            try:
                line = self._sock.recv(_MOST_BYTES)
            except BlockingIOError:
                return steps
            steps.append(Step(*json.loads(line)))

    def close(self) -> None:
        self._sock.close()
        self.path.unlink(missing_ok=True)
