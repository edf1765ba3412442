"""Who interrupts whom where CPUs are full: engines interrupt, the Ray around them waits."""

import json
import os
import subprocess
import sys
import threading

import pytest

from penstock.engines.vllm.core import plugin
from penstock.processes import cpu_turns

pytestmark = pytest.mark.skipif(
    os.sched_getscheduler(0) != os.SCHED_OTHER, reason="these tests run under another policy"
)

_SAY = "import os; print(os.sched_getscheduler(0))"
_ENGINE = f"from penstock.engines.vllm.core import plugin; plugin.register(); {_SAY}"


def policy(code: str) -> int:
    """That of a process started now, which prints it."""
    environment = os.environ | {plugin.OWNER: str(os.getpid())}
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True).stdout)


def test_a_child_waits_and_this_process_does_not_afterwards() -> None:
    with cpu_turns.children_wait():
        assert policy(_SAY) == os.SCHED_BATCH
    assert policy(_SAY) == os.sched_getscheduler(0) == os.SCHED_OTHER


def test_an_engine_below_a_process_that_waits_interrupts() -> None:
    with cpu_turns.children_wait():
        assert policy(_ENGINE) == os.SCHED_OTHER


def test_a_command_that_is_an_engine_interrupts() -> None:
    order = {"command": [sys.executable, "-c", _SAY], "environment": {}, "owner": os.getpid(), "grace_s": 5}
    with cpu_turns.children_wait():
        keeper = [sys.executable, "-m", "penstock.engines.process.keeper"]
        ended = subprocess.run(keeper, input=json.dumps(order), capture_output=True, text=True, check=True)
    assert int(ended.stdout) == os.SCHED_OTHER


def test_other_threads_of_this_process_stay_as_they_are() -> None:
    looked, ready = threading.Event(), threading.Event()
    found: list[int] = []

    def look() -> None:
        ready.wait(10)
        found.append(os.sched_getscheduler(0))
        looked.set()

    threading.Thread(target=look).start()
    with cpu_turns.children_wait():
        ready.set()
        assert looked.wait(10)
    assert found == [os.SCHED_OTHER]


def test_a_policy_that_a_user_chose_stays() -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        with cpu_turns.children_wait():
            pass
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_where_it_is_forbidden_nothing_fails(patched) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    patched(os, "sched_setscheduler", forbid)
    with cpu_turns.children_wait():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
