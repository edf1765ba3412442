"""Real processes: an owner, and a child tied to it."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys

from penstock.processes import lifeline

TIED = """
import os, sys, threading
from penstock.processes import lifeline
lifeline.tie_to(int(sys.argv[1]), lambda: os.write(1, b"farewell"))
print("tied", flush=True)
threading.Event().wait()
"""
LIMIT_S = 20


def tied_to(pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", TIED, str(pid)], stdout=subprocess.PIPE, text=True)


def owner() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def ended(pid: int) -> bool:
    poll = select.poll()
    poll.register(os.pidfd_open(pid), select.POLLIN)
    return bool(poll.poll(LIMIT_S * 1000))


def test_process_ends_when_its_owner_is_killed():
    parent = owner()
    child = tied_to(parent.pid)
    assert child.stdout
    assert child.stdout.readline() == "tied\n"
    parent.kill()
    assert child.wait(LIMIT_S) == lifeline.ORPHANED
    assert child.stdout.read() == "farewell"
    parent.wait()


def test_process_ends_at_once_when_its_owner_is_gone_already():
    parent = owner()
    parent.kill()
    parent.wait()
    assert tied_to(parent.pid).wait(LIMIT_S) == lifeline.ORPHANED


def test_an_owner_that_is_a_zombie_is_gone():
    parent = owner()
    parent.kill()
    assert ended(parent.pid)
    assert tied_to(parent.pid).wait(LIMIT_S) == lifeline.ORPHANED
    parent.wait()


def test_process_lives_while_its_owner_lives():
    parent = owner()
    child = tied_to(parent.pid)
    assert child.stdout
    assert child.stdout.readline() == "tied\n"
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(LIMIT_S) == -signal.SIGTERM
    parent.kill()
    parent.wait()


def test_the_end_of_a_process_is_told_also_when_it_has_ended_before():
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    process = owner()
    lifeline.when_ended(process.pid, lambda: told.put(1))
    process.kill()
    assert told.get(timeout=LIMIT_S) == 1
    process.communicate()
    lifeline.when_ended(process.pid, lambda: told.put(2))
    assert told.get(timeout=LIMIT_S) == 2
