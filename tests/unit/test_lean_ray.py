"""While a Ray of this command's own starts, processes of it that nobody uses are ended as they appear."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.processes.lean_ray import lean_start

SCRIPTS = ("_private/log_monitor.py", "dashboard/dashboard.py", "dashboard/agent.py")


@pytest.fixture
def start(tmp_path: Path):
    """Starts a process whose script has the place and name of one of Ray's."""
    started: list[subprocess.Popen[bytes]] = []

    def make(name: str) -> subprocess.Popen[bytes]:
        script = tmp_path / "ray" / name
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text("import time; time.sleep(600)")
        started.append(subprocess.Popen([sys.executable, str(script), "--session-dir=/tmp/ray"]))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())


def test_unused_processes_are_ended_and_the_others_stay(start):
    with lean_start(shows_output=False):
        monitor, dashboard, agent = map(start, SCRIPTS)
        assert dashboard.wait(30) is not None  # as Ray waits, while it starts
    assert (monitor.poll() is None, agent.poll() is None) == (False, True)


def test_output_of_workers_can_be_shown(start):
    with lean_start(shows_output=True):
        monitor = start(SCRIPTS[0])
    assert monitor.poll() is None


def test_rays_lines_about_what_was_ended_are_not_logged(caplog: pytest.LogCaptureFixture):
    services = logging.getLogger("ray._private.services")
    with lean_start(shows_output=False):
        services.error("Failed to start the dashboard, return code -9")
        services.error("No space left on device")
    services.error("Failed to start the dashboard")
    assert [record.getMessage() for record in caplog.records] == [
        "No space left on device",
        "Failed to start the dashboard",
    ]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    name = "RAY_event_stats"
    monkeypatch.setenv(name, "1")
    with lean_start(shows_output=False):
        assert os.environ[name] == "1"
