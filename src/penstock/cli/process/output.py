"""Keeps the terminal for the command itself; foreign code writes to a log file instead.

Ray, Serve and their C++ parts print as they please, also when they end. File descriptors 1 and 2 therefore
lead to the log, and what users read goes to copies of the original ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from penstock.json_logs import error_line


class TerminalWriter(io.TextIOWrapper):
    """Writes text to a descriptor and ignores errors: serving goes on when the terminal or pipe is gone."""

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

    def say_error(self, sentences: Sequence[str], *, as_json: bool) -> None:
        """Tells the user why the command ends."""
        text = error_line(" ".join(sentences)) if as_json else "\n".join(sentences)
        print(text, file=self.err)

    def note(self, text: str) -> None:
        """Writes to where foreign code writes."""
        os.write(2, f"{text}\n".encode(errors="replace"))


def redirect_output(log: Path | None) -> Output:
    """Copies of stdout and stderr; what is written to the originals goes to `log` from now on."""
    output = Output(TerminalWriter(os.dup(1)), TerminalWriter(os.dup(2)), log)
    err = output.err.fileno()  # several processes write to it: in a file, none may write over another's lines
    fcntl.fcntl(err, fcntl.F_SETFL, fcntl.fcntl(err, fcntl.F_GETFL) | os.O_APPEND)
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    return output
