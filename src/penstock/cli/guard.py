"""Leaving nothing behind: work runs in a child process whose parent outlives it and ends what it left.

    penstock serve          the guard: passes signals on, adopts orphans, ends them
    └── penstock serve      the work, in a session of its own: a signal to the process group of a terminal
        ├── raylet ...      or supervisor reaches it once, through the guard, and Ray not at all
        └── gcs_server

The guard runs no foreign code, so it answers while the work is stuck in some. It tells of signals through a
pipe, because Ray's C++ part takes the signal handlers of its process for itself. Killed, it still has an
heir: the work reads the end of the pipe and stops as it always does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from types import FrameType

import psutil

from penstock.cli.failure import crashed

STOPS = tuple(
    signum
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(signum) is not signal.SIG_IGN  # as after `nohup`
)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.05

Work = Callable[[int], int]
"""Takes a descriptor, returns an exit code. Each byte to read is the number of a signal; the end of the file
means that the guard is gone."""


def guarded(work: Work, *, stop_s: float) -> int:
    """Exit code of `work`, run in a child process. Afterwards no descendant of this process is left.

    Must be called before any thread is started.
    Units: stop_s is the work's time from the first signal until it is killed; ending what it left takes up to
    4 s more.
    """
    adopt_orphans()
    told, tell = os.pipe()
    with _blocked(STOPS):  # a signal between fork and handler would end one of the two
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(tell)
        else:
            os.close(told)
            _pass_on_signals(child, tell, stop_s)
    if child == 0:
        _exit_with(work, told)
    code = _wait_for(child)
    for signum in (*STOPS, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)  # what is left to do is bounded
    end_descendants()
    return code


def end_descendants(term_s: float = 1.0, kill_s: float = 3.0) -> None:
    """Asks every descendant of this process to end (SIGTERM), and then makes it (SIGKILL).

    Reaps whatever has ended, so no other code of this process may be waiting for a child.
    """
    for signum, limit_s in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + limit_s
        told: set[int] = set()
        while (living := _descendants()) and time.monotonic() < deadline:
            for process in living:
                if process.pid not in told:  # one that ends may leave another, which we adopt
                    told.add(process.pid)
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(signum)
            time.sleep(_LOOK_S)


def adopt_orphans() -> None:
    """Makes this process, not init, the new parent of descendants that lose theirs: so they can be found.

    For the guard, and for the work when its guard is gone.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _descendants() -> list[psutil.Process]:
    _reap()
    living: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextlib.contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Generator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _exit_with(work: Work, told: int) -> None:
    code = 1
    try:
        code = work(told)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        code = crashed(error)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # foreign threads and exit hooks have no say in when we end


def _pass_on_signals(child: int, tell: int, stop_s: float) -> None:
    def pass_on(signum: int, frame: FrameType | None) -> None:
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, stop_s)
        with contextlib.suppress(BrokenPipeError):
            os.write(tell, bytes([signum]))

    def give_up(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    for signum in STOPS:
        signal.signal(signum, pass_on)
    signal.signal(signal.SIGALRM, give_up)


def _wait_for(child: int) -> int:
    """Exit code of `child`, as a shell would give it; every other child that ends is reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
