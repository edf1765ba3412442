"""A process that stands still is found; one that is only slow is left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from penstock.engines import watchdog
from penstock.engines.watchdog import Watchdog

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S26")]

LOOKING = """
import time
while True:
    time.sleep(0.5)
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
"""

LIMIT_S, WATCHED_S = 5, 3
"""Within which one that stands still must be found, and for which one is watched that must not be."""


@contextmanager
def child(program: str):
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def watching(process: subprocess.Popen[bytes], *, working: bool, answers: bool = True) -> Watchdog:
    async def probe() -> None:
        if not answers:
            await asyncio.Event().wait()

    return Watchdog(lambda: process.pid, steps=lambda: 1, working=lambda: working, probe=probe)


async def verdict(dog: Watchdog, limit_s: float) -> str | None:
    try:
        return await asyncio.wait_for(dog.stalled(), limit_s)
    except TimeoutError:
        return None


@pytest.mark.parametrize("working", [True, False])
async def test_a_stopped_process_is_found(working: bool):
    with child("import time; time.sleep(60)") as process:
        process.send_signal(signal.SIGSTOP)
        assert "stopped" in str(await verdict(watching(process, working=working), LIMIT_S))


async def test_a_stopped_process_is_found_by_one_that_is_itself_delayed_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(watchdog, "STOPPED_S", 1.0)

    async def delay() -> None:
        while True:
            await asyncio.sleep(0.4)
            time.sleep(1.2)  # noqa: ASYNC251 - the delay

    delays = asyncio.create_task(delay())
    with child("import time; time.sleep(60)") as process:
        process.send_signal(signal.SIGSTOP)
        found = await verdict(watching(process, working=True), 4 * LIMIT_S)
        delays.cancel()
    assert "stopped" in str(found)


async def test_what_is_not_watched_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """A machine that stood still, and an engine that goes on a little later."""
    monkeypatch.setattr(watchdog, "STOPPED_S", 1.5)
    with child("import time; time.sleep(60)") as process:
        process.send_signal(signal.SIGSTOP)
        watched = asyncio.create_task(verdict(watching(process, working=True), 6.5))
        await asyncio.sleep(0.5)
        time.sleep(2 * watchdog.STOPPED_S)  # noqa: ASYNC251 - the machine
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        assert await watched is None


@pytest.mark.parametrize("idle", [0, 40])
async def test_one_that_computes_without_a_step_is_left_alone(idle: int, monkeypatch: pytest.MonkeyPatch):
    """A long prompt, or a compile beside compilers that have nothing to do."""
    monkeypatch.setattr(watchdog, "IDLE_S", 1.5)
    beside = f"import subprocess; [subprocess.Popen(['sleep', '10']) for _ in range({idle})]"
    with child(f"{beside}\nwhile True: pass") as process:
        assert await verdict(watching(process, working=True), WATCHED_S) is None


async def test_one_that_would_compute_and_gets_no_cpu_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    """On a full machine: beside others, `SCHED_IDLE` is given some thousandths of a core."""
    monkeypatch.setattr(watchdog, "IDLE_S", 1.5)
    with ExitStack() as others, child("while True: pass") as process:
        for _ in range(os.cpu_count() or 1):
            others.enter_context(child("while True: pass"))
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        assert await verdict(watching(process, working=True), WATCHED_S) is None


async def test_one_that_has_work_and_does_nothing_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "IDLE_S", 1.0)
    monkeypatch.setattr(watchdog, "PROBE_S", 1.0)
    with child("import time; time.sleep(60)") as process:
        assert "did nothing" in str(await verdict(watching(process, working=True), LIMIT_S))
        assert "did nothing" in str(await verdict(watching(process, working=False, answers=False), LIMIT_S))
        assert await verdict(watching(process, working=False), WATCHED_S) is None  # idle, and it answers


async def test_one_that_has_work_and_only_waits_is_found_though_waiting_takes_some_cpu(
    monkeypatch: pytest.MonkeyPatch,
):
    """As a vLLM core whose step never returns: its threads wake up and look."""
    monkeypatch.setattr(watchdog, "IDLE_S", 2.0)
    with child(LOOKING) as process:
        assert "did nothing" in str(await verdict(watching(process, working=True), 2 * LIMIT_S))


def test_an_idle_one_that_stands_still_is_found_in_half_a_minute():
    assert watchdog.PROBE_S >= 10, "an idle device shall rest"
    assert watchdog.PROBE_S + watchdog.IDLE_S < 30


async def test_one_that_rests_is_given_nothing_to_do_and_found_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(watchdog, "PROBE_S", 0.2)
    probed = asyncio.Event()

    async def probe() -> None:
        probed.set()

    with child("import time; time.sleep(60)") as process:
        dog = Watchdog(
            lambda: process.pid, steps=lambda: 1, working=lambda: False, probe=probe, resting=lambda: True
        )
        assert await verdict(dog, 1.0) is None
        assert not probed.is_set()
        process.send_signal(signal.SIGSTOP)
        assert "stopped" in str(await verdict(dog, LIMIT_S))


async def test_one_that_finishes_nothing_is_found_in_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog, "STUCK_S", 1.0)
    with child("while True: pass") as process:
        assert "no step" in str(await verdict(watching(process, working=True), LIMIT_S))
