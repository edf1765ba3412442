"""Ends this process when another one ends, so that it is never orphaned.

The kernel reports the end through a pidfd, so it works for any process, not only for parents, and does not
depend on the thread that started this one, as PR_SET_PDEATHSIG does.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import NoReturn

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
    if pid in _tied:
        return
    _tied.add(pid)
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        _end(cleanup)
    threading.Thread(target=_end_with, args=(owner, cleanup), name=f"lifeline to {pid}", daemon=True).start()


def _end_with(owner: int, cleanup: Callable[[], None]) -> None:
    ended = select.poll()
    ended.register(owner, select.POLLIN)
    ended.poll()
    _end(cleanup)


def _end(cleanup: Callable[[], None]) -> NoReturn:
    try:
        cleanup()
    finally:
        os._exit(ORPHANED)
