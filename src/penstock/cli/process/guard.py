"""Runs work in a child process; its parent, the guard, outlives it and ends every process that it left.

    penstock serve          the guard: passes signals on, adopts orphans, ends them
    └── penstock serve      the work, in a session of its own: a signal to the process group of a terminal
        ├── raylet ...      or supervisor reaches it once, through the guard, and Ray not at all
        └── gcs_server

The guard runs no foreign code, so it answers while the work is stuck in some. It sends signals through a
pipe, because Ray's C++ part replaces the signal handlers of its process. When the guard is killed, the work
reads the end of the pipe and stops by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from penstock.cli.process.failure import crashed
from penstock.cli.process.output import TerminalWriter
from penstock.errors import Unavailable
from penstock.processes.tree import adopt_orphans, end_descendants

STOPS = tuple(
    signum
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(signum) is not signal.SIG_IGN  # ignored after `nohup`
)

Work = Callable[[int], int]
"""Takes a file descriptor, returns an exit code. Each byte read from it is the number of a signal; its end
means that the guard is gone."""


def guarded(work: Work, *, stop_s: float) -> int:
    """Exit code of `work`, run in a child process. Afterwards no descendant of this process is left.

    Must be called before any thread is started.
    Raises: Unavailable on another system than Linux, and where no process can be started.
    Units: stop_s is the work's time from the first signal until it is killed; ending what it left takes up to
    4 s more.
    """
    if sys.platform != "linux":
        raise Unavailable(
            "Engines run on Linux only. Use the image (Dockerfile), or ask a service on another machine, as "
            "`penstock chat --url http://gpu-box:8000` does."
        )
    adopt_orphans()
    read_fd, write_fd = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # between fork and handler one would end one of the two
    try:
        child = os.fork()
        if child == 0:
            os.setsid()
            os.close(write_fd)
        else:
            os.close(read_fd)
            _pass_on_signals(child, write_fd, stop_s)
    except OSError as error:
        raise Unavailable(
            f"No process can be started: {error.strerror}. End others, or raise the limit: ulimit -u."
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    if child == 0:
        _exit_with(work, read_fd)
    code = _wait_for(child)
    for signum in (*STOPS, signal.SIGALRM):
        signal.signal(signum, signal.SIG_IGN)  # the rest takes at most 4 s
    end_descendants()
    return code


def _exit_with(work: Work, read_fd: int) -> None:
    code, err = 1, TerminalWriter(os.dup(2))  # `work` may redirect its own to a log
    try:
        code = work(read_fd)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException as error:
        code = crashed(error, err)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # foreign threads and exit hooks must not delay the end


def _pass_on_signals(child: int, write_fd: int, stop_s: float) -> None:
    def pass_on(signum: int, frame: FrameType | None) -> None:
        if not signal.getitimer(signal.ITIMER_REAL)[0]:
            signal.setitimer(signal.ITIMER_REAL, stop_s)
        with contextlib.suppress(BrokenPipeError):
            os.write(write_fd, bytes([signum]))

    def kill_child(signum: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    for signum in STOPS:
        signal.signal(signum, pass_on)
    signal.signal(signal.SIGALRM, kill_child)


def _wait_for(child: int) -> int:
    """Exit code of `child`, as a shell would give it; every other child that ends is reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
