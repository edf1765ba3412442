"""Ends processes with all that they have started. Knows nothing of engines."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_POLL_S = 0.02


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid`; none once it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill_tree(root: subprocess.Popen[bytes]) -> None:
    """Kills a child of this process and every process below it, in whatever state they are."""
    for process in (*descendants(root.pid), root):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def end(processes: Sequence[psutil.Process], wait_s: float, kill_s: float) -> None:
    """Waits `wait_s` for processes that are about to end; kills the others and waits `kill_s` for them."""
    _, alive = psutil.wait_procs(processes, timeout=wait_s)
    for process in alive:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=kill_s)


def adopt_orphans() -> None:
    """Makes this process, not init, the parent of descendants that lose theirs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(term_s: float = 1.0, kill_s: float = 3.0) -> None:
    """Sends SIGTERM to every descendant of this process; after `term_s` SIGKILL, for at most `kill_s`.

    Reaps whatever has ended, so no other code of this process may be waiting for a child.
    """
    for signum, limit_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + limit_s
        signalled: set[int] = set()
        while (living := _living()) and time.monotonic() < deadline:
            for process in living:
                if process.pid not in signalled:  # one that ends may leave another, which we adopt
                    signalled.add(process.pid)
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signum)
            time.sleep(_POLL_S)


def _living() -> list[psutil.Process]:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    living: list[psutil.Process] = []
    for process in descendants(os.getpid()):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living
