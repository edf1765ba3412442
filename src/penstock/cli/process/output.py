"""The terminal as the command keeps it for itself, while foreign code writes to a log file instead.

Ray, Serve and their C++ parts print as they please, also when they end. File descriptors 1 and 2 therefore
lead to the log, and what the user shall read goes to copies of the original ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


class Outlet(io.TextIOWrapper):
    """Text that goes to a descriptor; a terminal or pipe that is gone is no reason to stop serving."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(
            os.fdopen(descriptor, "wb", 0), encoding="utf-8", errors="replace", write_through=True
        )

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


@dataclass(frozen=True, slots=True)
class Output:
    """Where the command writes. `log` is None when foreign output stays on the terminal."""

    out: TextIO
    err: TextIO
    log: Path | None

    @property
    def err_path(self) -> str:
        """Name under which other processes of this user on this machine can open `err`."""
        return f"/proc/{os.getpid()}/fd/{self.err.fileno()}"

    def note(self, text: str) -> None:
        """Writes to where foreign code writes."""
        os.write(2, f"{text}\n".encode(errors="replace"))


def kept(log: Path | None) -> Output:
    """Copies of stdout and stderr; what is written to the originals goes to `log` from now on."""
    output = Output(Outlet(os.dup(1)), Outlet(os.dup(2)), log)
    _append(output.err.fileno())
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    return output


def _append(descriptor: int) -> None:
    """Several processes write to it: in a file, none may write over another's lines."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
