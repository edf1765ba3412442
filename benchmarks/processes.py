"""Processes of one contestant: which there are, what CPU and memory they take, what is left of them.

A contestant's processes are the descendants of the one that was started. This process adopts orphans
(PR_SET_CHILD_SUBREAPER), so a descendant cannot get lost by the death of its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

KINDS = ("engine", "front", "gateway", "ray")
"""engine: vLLM's engine core and its worker. front: the process in which HTTP requests become the engine's.
gateway: what stands between it and the public port. ray: everything else (raylet, GCS, controller, driver).
"""

_TITLES = (
    ("engine", re.compile(r"VLLM::(Engine|Worker)|penstock\.engines\.vllm\.core|multiprocessing\.spawn")),
    ("gateway", re.compile(r"ray::(ServeReplica:.*(Router|Ingress|Gateway)|ProxyActor|HAProxy)|haproxy")),
    ("front", re.compile(r"ray::ServeReplica:|vllm\.entrypoints\.openai\.api_server")),
)
_HEAVY = re.compile(r"^VLLM::|^ray::|vllm\.(entrypoints|core)|/raylet |/gcs_server ")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far, process by process. machine_s: of the whole machine. at_s: the monotonic clock."""

    by_process: dict[tuple[int, float], tuple[str, float]]
    machine_s: float
    at_s: float

    def since(self, earlier: Usage) -> dict[str, float]:
        """CPU seconds by kind from `earlier` to now. A process that ended in between is not seen."""
        spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for process, (kind, seconds) in self.by_process.items():
            spent[kind] += seconds - earlier.by_process.get(process, (kind, 0.0))[1]
        return spent


def adopt_orphans() -> None:
    """From now on descendants that lose their parent become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def title(process: psutil.Process) -> str:
    """Command line, or the title that the process gave itself; empty when it has gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def kind_of(process_title: str) -> str:
    """One of KINDS."""
    return next((kind for kind, pattern in _TITLES if pattern.search(process_title)), "ray")


def descendants(root: psutil.Process | None = None) -> list[psutil.Process]:
    """Living descendants of `root`, by default of this process."""
    living: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (root or psutil.Process()).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
    return living


def usage() -> Usage:
    """Of all descendants of this process."""
    by_process: dict[tuple[int, float], tuple[str, float]] = {}
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            by_process[process.pid, process.create_time()] = (
                kind_of(title(process)),
                times.user + times.system,
            )
    machine = psutil.cpu_times()
    busy_s = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
    return Usage(by_process, busy_s, time.monotonic())


def memory_mib(processes: Iterable[psutil.Process]) -> float:
    """Proportional set size: a page shared by n processes counts 1/n for each."""
    return sum(_pss_kib(process.pid) for process in processes) / 1024


def strangers() -> list[str]:
    """vLLM and Ray processes that are not ours, perhaps left by an earlier run: "pid title"."""
    ours = {os.getpid(), *(process.pid for process in descendants())}
    others = ((process.pid, title(process)) for process in psutil.process_iter() if process.pid not in ours)
    return [f"{pid} {text[:80]}" for pid, text in others if _HEAVY.search(text)]


def wait_idle(limit_s: float = 60.0, busy: float = 0.1) -> bool:
    """Waits for a second in which less than `busy` of the machine was; False at the time limit."""
    deadline = time.monotonic() + limit_s
    while psutil.cpu_percent(interval=1.0) > 100 * busy:
        if time.monotonic() > deadline:
            return False
    return True


def wait_ended(processes: Iterable[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those of `processes` that live on after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while (living := list(_living(processes))) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return living


def end_all() -> None:
    """Ends every descendant of this process: by SIGTERM, and after 3 s by SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for process in descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
        wait_ended(descendants(), 3.0)


def _living(processes: Iterable[psutil.Process]) -> Iterator[psutil.Process]:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def _pss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
