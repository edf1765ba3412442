"""Ends this process when another one ends, so that it is never orphaned.

The kernel reports the end through a pidfd, so it works for any process, not only for parents, and does not
depend on the thread that started this one, as PR_SET_PDEATHSIG does.
"""

import os
import select
import threading
from collections.abc import Callable
from functools import partial

ORPHANED = 86
"""Exit status of a process whose owner ended first."""

_tied: set[int] = set()
os.register_at_fork(after_in_child=_tied.clear)  # a fork has no threads


def tie_to(pid: int, cleanup: Callable[[], None] = lambda: None) -> None:
    """Ends this process as soon as process `pid` has ended; at once if it already has.

    cleanup: runs before that, in another thread, and must be quick.
    A pid that was reused before this call cannot be told from the old process: call it early.
    A second call for the same process does nothing.
    """
    if pid not in _tied:
        _tied.add(pid)
        when_ended(pid, partial(_end, cleanup))


def when_ended(pid: int, then: Callable[[], None]) -> None:
    """Calls `then`, on a thread of its own, as soon as process `pid` has ended; at once if it already has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        then()
    else:
        threading.Thread(target=_wait, args=(process, then), name=f"end of {pid}", daemon=True).start()


def _wait(process: int, then: Callable[[], None]) -> None:
    ended = select.poll()
    ended.register(process, select.POLLIN)
    ended.poll()
    os.close(process)
    then()


def _end(cleanup: Callable[[], None]) -> None:
    try:
        cleanup()
    finally:
        os._exit(ORPHANED)
