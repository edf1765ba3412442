"""What a Ray that a command starts for itself leaves out, because nothing there uses it.

Each item says what it would be for. What the user has set in the environment stays.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil

# Each process of Ray's keeps the times of its own handlers, some of which run 100 times a second, for Ray's
# developers.
_EVENT_STATS = "RAY_event_stats"
_LOG_MONITOR = "/_private/log_monitor.py"  # shows workers' output in their driver; here it stays in files
_UNUSED = (
    "/dashboard/dashboard.py",  # without a dashboard it only reports usage, which is off
    "/autoscaler/_private/monitor.py",  # adds nodes; this cluster is this machine
)
_LOOK_S, _END_S = 0.1, 5.0


@contextmanager
def lean_start(*, shows_output: bool) -> Generator[None]:
    """While it lasts, this process starts Ray, and each process of Ray's that is not used is ended as it
    appears: Ray would wait for one of them, and goes on without it.

    shows_output: whether this process prints what workers print.
    """
    os.environ.setdefault(_EVENT_STATS, "0")
    unused = _UNUSED if shows_output else (*_UNUSED, _LOG_MONITOR)
    done = threading.Event()
    ending = threading.Thread(target=_end_until, args=(unused, done), name="lean ray")
    services = logging.getLogger("ray._private.services")
    services.addFilter(_is_of_use)
    ending.start()
    try:
        yield
    finally:
        done.set()
        ending.join()
        services.removeFilter(_is_of_use)


def _end_until(scripts: tuple[str, ...], done: threading.Event) -> None:
    """Ends the children that run one of `scripts`; once more when the start is done."""
    is_done = False
    while not is_done:
        is_done = done.wait(_LOOK_S)
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                if any(word.endswith(scripts) for word in child.cmdline()):
                    child.kill()
                    child.wait(_END_S)


def _is_of_use(record: logging.LogRecord) -> bool:
    """Whether a line of Ray is not about the process that was ended."""
    return "dashboard" not in record.getMessage()
