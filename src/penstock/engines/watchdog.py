"""Detects an engine whose processes are alive but make no progress.

An engine that died is noticed by its end; a stuck one is not. How long it may stall depends on its processes:
stopped ones do not come back, ones that use hardly any CPU may wait for a device, one that computes, or would
if it were given a CPU, may be busy with a prompt of a million tokens, or compile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

import psutil

log = logging.getLogger(__name__)

STOPPED_S = 2.5
"""After SIGSTOP. A process in a debugger is not taken for stopped."""

IDLE_S = 18.0
"""Without a step, with hardly any CPU time and none waited for, while there is work. With `PROBE_S` before it
less than 30 s.
"""

_WAITING_SHARE, _WAITING_MOST = 0.03, 0.5
"""Of a core, for each process and for all of them: up to this much is hardly any. A vLLM core that only waits
uses 0.01; one that compiles may do so alone beside dozens of idle compilers.
"""

STUCK_S = 600.0
"""Without a step, while there is work, although it uses CPU."""

PROBE_S = 10.0
"""After this long without a step, an idle engine is probed: seldom enough to leave its device at rest."""

_LOOK_S = 0.25
_LATE_S = 4 * _LOOK_S
"""A look that is later counts as one in time: what delayed us may have delayed the engine."""

_FAMILY_S = 10.0  # how often its children are listed


@dataclass(eq=False)
class Watchdog:
    """Watches one engine.

    pid: of its process; None while it has none and may be still.
    steps: changes after each step. working: whether it has something to do.
    probe: a little work for an idle one. resting: whether it need make no step: it is only observed.
    workers_elsewhere: whether the processes that compute are not below `pid`.
    """

    pid: Callable[[], int | None]
    _: KW_ONLY
    steps: Callable[[], int]
    working: Callable[[], bool]
    probe: Callable[[], Awaitable[object]]
    resting: Callable[[], bool] = lambda: False
    workers_elsewhere: bool = False
    _probing: asyncio.Task[object] | None = None

    async def stalled(self) -> str:
        """Returns the reason as soon as the engine is stuck; never, while it makes progress."""
        try:
            return await self._watch()
        finally:
            if self._probing is not None:
                self._probing.cancel()

    async def _watch(self) -> str:
        family, steps, cpu_s = _Family(None), self.steps(), 0.0
        limit_s = STUCK_S if self.workers_elsewhere else IDLE_S
        now = ran = stepped = 0.0  # seconds that we have watched
        idle_s = 0.0  # of them without a step, while it had work and wanted no CPU
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            passed_s, pid = time.monotonic() - looked, self.pid()
            looked += passed_s
            watched_s = passed_s if passed_s <= _LATE_S else _LOOK_S
            now += watched_s
            if pid is None or family.pid != pid:  # it is a new engine
                family = family if family.pid == pid else _Family(pid)
                ran, stepped, idle_s = now, now, 0.0
            if pid is None:
                continue
            statuses = family.statuses()
            if psutil.STATUS_STOPPED not in statuses:
                ran = now
            if now - ran > STOPPED_S:
                return f"its process has been stopped for {STOPPED_S:g} s"
            if self.resting():
                stepped, idle_s = now, 0.0
                continue
            if self._is_answered() or self.steps() != steps:
                steps, stepped, idle_s = self.steps(), now, 0.0
            if self._probing is None and not self.working():
                idle_s = 0.0
                if now - stepped > PROBE_S:
                    stepped, self._probing = now, asyncio.ensure_future(self.probe())
                continue
            spent = family.cpu_s()
            cpu_s = min(cpu_s, spent)  # a member that ended may be missing
            if spent - cpu_s > min(_WAITING_SHARE * len(family.members()), _WAITING_MOST) * limit_s:
                cpu_s, idle_s = spent, 0.0
            elif psutil.STATUS_RUNNING not in statuses:  # neither computes nor waits for a CPU
                idle_s += watched_s
            if idle_s > limit_s:
                return f"it has work and did nothing for {limit_s:g} s"
            if now - stepped > STUCK_S:
                return f"it has work and finished no step of it for {STUCK_S:g} s"

    def _is_answered(self) -> bool:
        """Whether our probe was answered; an error counts, too."""
        if self._probing is None or not self._probing.done():
            return False
        probing, self._probing = self._probing, None
        if not probing.cancelled() and (error := probing.exception()) is not None:
            log.warning("The engine answered a probe with an error: %s", error)
        return True


class _Family:
    """A process and its descendants."""

    def __init__(self, pid: int | None) -> None:
        self.pid = pid
        self._members: list[psutil.Process] = []
        self._found_at = -_FAMILY_S

    def statuses(self) -> set[str]:
        """psutil's; a process is "running" where its first thread has a CPU, or waits for one."""
        return {_status(member) for member in self.members()}

    def cpu_s(self) -> float:
        """CPU time of all of them, with children that have ended."""
        return sum(_cpu_s(member) for member in self.members())

    def members(self) -> list[psutil.Process]:
        if (now := time.monotonic()) - self._found_at > _FAMILY_S and self.pid is not None:
            self._found_at = now
            try:
                head = psutil.Process(self.pid)
                self._members = [head, *head.children(recursive=True)]
            except psutil.NoSuchProcess:
                self._members = []
        return self._members


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.Error:
        return psutil.STATUS_DEAD


def _cpu_s(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times())
    except psutil.Error:
        return 0.0
