"""Which processes the kernel runs first where CPUs are full: the engine's.

A front-end wakes up for each step of its engine. Where no CPU is idle, Linux lets a process that wakes up
interrupt the one that runs, and that is often the engine in its next step. Under the policy SCHED_BATCH a
process that wakes up waits instead, until a CPU is free or the other's turn is over (some 3 ms). So
front-ends wait, and a Ray that Penstock starts with all of its processes; engines alone interrupt. That takes
no privilege, and changes nothing where CPUs are idle. Figures: "Who interrupts whom" in benchmarks/log.md.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress

_PRIORITY = os.sched_param(0)  # the only one of both policies


def wait() -> None:
    """This thread, and what it starts, waits for a CPU where others run."""
    _follow(os.SCHED_BATCH)


@contextmanager
def children_wait() -> Generator[None]:
    """While it lasts, threads and processes that this thread starts wait for a CPU, as do their own."""
    before = os.sched_getscheduler(0)
    wait()
    try:
        yield
    finally:
        _follow(before)


def interrupt() -> None:
    """This thread, and what it starts, interrupts those that wait. Call it before the first other thread."""
    if os.sched_getscheduler(0) == os.SCHED_BATCH:
        _follow(os.SCHED_OTHER)


def _follow(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid it: speed is all that is lost
        os.sched_setscheduler(0, policy, _PRIORITY)
