"""What `penstock serve` does when a process of the service ends."""

from __future__ import annotations

import queue
import subprocess
import sys

from penstock.cli.serve.startup import Event, Note, report_end

LIMIT_S = 30
GONE = Note("gone")


def test_the_end_of_a_process_is_reported_also_when_it_has_ended_before():
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    report_end(process.pid, GONE, events.put)
    process.kill()
    assert events.get(timeout=LIMIT_S) is GONE
    process.communicate()
    report_end(process.pid, GONE, events.put)
    assert events.get(timeout=LIMIT_S) is GONE
