"""The child process, seen from its owner: start it, read its output, notice its end at once, stop it.

The `keeper` stands between the two. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.engines.process import keeper
from penstock.processes.tree import kill_tree

_KEEPER_S = 7.0  # the keeper's own time after the command's grace: it kills for up to 5 s
_READ_BYTES = 1 << 16
_KEPT_BYTES = 8192
_SHOWN_LINES = 12
_SHOWN_CHARACTERS = 1500
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Child:
    """A running command; create it in the event loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], grace_s: float) -> None:
        """Starts it. grace_s: from SIGTERM to SIGKILL."""
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._tail = b""
        self.ended: asyncio.Future[str] = self._loop.create_future()
        """The reason, once it has ended."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", keeper.__name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A vLLM server would ask us for the gateway's key in place of the one that the command gives it.
        inherited = {name: text for name, text in os.environ.items() if name != "VLLM_API_KEY"}
        order = {
            "command": list(command),
            "environment": {**inherited, **environment},
            "owner": os.getpid(),
            "grace_s": grace_s,
        }
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it has ended, as `ended` will say
            pipe.write(json.dumps(order).encode())
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._hear)
        self._watch = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._watch, self._on_end)

    @property
    def pid(self) -> int:
        """Of the keeper; the command and its children are below it."""
        return self._process.pid

    def kill(self) -> None:
        """Kills it and its descendants at once."""
        kill_tree(self._process)

    def last_words(self) -> str:
        """The last lines of its output."""
        text = _COLOUR.sub("", self._tail.decode(errors="replace"))
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        return "\n".join(lines[-_SHOWN_LINES:])[-_SHOWN_CHARACTERS:]

    async def stop(self) -> None:
        """Ends it and its descendants. Idempotent."""
        if not self.ended.done():
            self._process.terminate()
            await asyncio.wait({self.ended}, timeout=self._grace_s + _KEEPER_S)
        if not self.ended.done():
            self._process.kill()
            await asyncio.wait({self.ended})

    def _hear(self) -> bool:
        """Copies its output to ours and keeps the last lines. False when there is no more for now."""
        try:
            said = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not said:
            self._loop.remove_reader(self._output)
            return False
        self._tail = (self._tail + said)[-_KEPT_BYTES:]
        with suppress(OSError, ValueError):  # ours goes nowhere any more: to a full disk, or a closed pipe
            sys.stderr.write(said.decode(errors="replace"))
        return True

    def _on_end(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        # What is left where the keeper was killed; before it is reaped, so that its number cannot be reused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        while self._hear():
            pass
        self._loop.remove_reader(self._output)
        assert self._process.stdout is not None
        self._process.stdout.close()
        if not self.ended.done():
            self.ended.set_result(said_by(status))


def said_by(status: int) -> str:
    """What an exit status says; one above 128 is that of a keeper or a shell whose command was killed."""
    killed_by = -status if status < 0 else status - 128
    if killed_by not in set(signal.Signals):
        return f"its process ended with status {status}"
    hint = ", perhaps because memory ran out" if killed_by == signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(killed_by).name}{hint}"
