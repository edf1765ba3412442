"""Runs one command, and leaves nothing of it behind: `python -m penstock.engines.process.keeper`.

    owner            the process with the engine; it starts the keeper and reads the command's output
    └── keeper       in a session of its own; adopts what the command's processes leave
        └── command  any program, with children of its own

The command ends with the keeper, the keeper with its owner, however that one ended. It has one thread and
imports little.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from penstock.processes import cpu_turns
from penstock.processes.lifeline import ORPHANED
from penstock.processes.tree import adopt_orphans, end_descendants

NOT_RUN = 127
"""Exit status when the command could not be started, as shells have it."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILL_S = 5.0

_prctl = ctypes.CDLL(None).prctl  # looked up before a fork, after which nothing may be imported


def main() -> int:
    """Exit status of the command; of one that a signal killed, 128 and its number."""
    order: Mapping[str, Any] = json.load(sys.stdin)
    woken, wakeup = os.pipe()
    for end in (woken, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, _wake)
    adopt_orphans()
    cpu_turns.interrupt()
    try:
        owner = os.pidfd_open(order["owner"])
    except ProcessLookupError:
        return ORPHANED
    try:
        command = subprocess.Popen(
            order["command"], env=order["environment"], stdin=subprocess.DEVNULL, preexec_fn=_die_with_us
        )
    except OSError as error:
        print(f"{order['command'][0]}: {error.strerror}", file=sys.stderr)
        return NOT_RUN
    status = _watch(command, owner, woken, order["grace_s"])
    end_descendants(term_s=0.0, kill_s=_KILL_S)
    return status


def _watch(command: subprocess.Popen[bytes], owner: int, woken: int, grace_s: float) -> int:
    """Waits until the command or the owner has ended; on a signal, ends the command within its grace time."""
    ended = os.pidfd_open(command.pid)
    poll = select.poll()
    for descriptor in (owner, ended, woken):
        poll.register(descriptor, select.POLLIN)
    deadline: float | None = None
    while True:
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        ready = {descriptor for descriptor, _ in poll.poll(left_ms)}
        if ended in ready:
            status = command.wait()
            return status if status >= 0 else 128 - status
        if owner in ready:
            return ORPHANED
        if woken in ready:
            os.read(woken, 64)
            command.terminate()
            deadline = deadline or time.monotonic() + grace_s
        elif deadline is not None and not ready:
            return 128 + signal.SIGKILL


def _wake(signum: int, frame: FrameType | None) -> None:
    """The number goes through the wakeup descriptor; without a handler none would."""


def _die_with_us() -> None:
    """Between fork and exec. The kernel's own tie, should we be killed; we have one thread only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
