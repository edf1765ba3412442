"""This process ends when that one does. For processes that nobody else would collect.

The kernel tells of the end through a pidfd, so it works for any process, not for parents only, and does not
depend on the thread that started us, as PR_SET_PDEATHSIG does.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from typing import NoReturn

ORPHANED = 86
"""Exit status of a process whose owner ended before it."""

_tied: set[int] = set()
os.register_at_fork(after_in_child=_tied.clear)  # threads stay behind


def tie_to(pid: int, farewell: Callable[[], None] = lambda: None) -> None:
    """End this process at once as soon as process `pid` has ended; now, if it already has.

    farewell: does what must still be done. It runs beside whatever the process is doing, and must be quick.
    A pid that was given to a new process before we looked cannot be told from the old one: tie early.
    Tied twice to the same process is tied once.
    """
    if pid in _tied:
        return
    _tied.add(pid)
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        _end(farewell)
    threading.Thread(target=_end_with, args=(owner, farewell), name=f"lifeline to {pid}", daemon=True).start()


def _end_with(owner: int, farewell: Callable[[], None]) -> None:
    ended = select.poll()
    ended.register(owner, select.POLLIN)
    ended.poll()
    _end(farewell)


def _end(farewell: Callable[[], None]) -> NoReturn:
    try:
        farewell()
    finally:
        os._exit(ORPHANED)
