"""A model's requests go to another application's replicas and back, and none of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve
from tests.ray.front import Front, config
from tests.ray.zoo import KEY

from penstock.errors import BadRequest
from penstock.serve import build_llm_deployment

pytestmark = [pytest.mark.parity("S24", "S25"), pytest.mark.full]

STREAMS = 4
OTHER, CHANGED = "the other one says", "the changed one says"


class Load:
    """Streams without pause, each of some twenty tokens."""

    def __init__(self, front: Front) -> None:
        self.answers: list[str] = []
        self._front = front
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self.answers.append(self._front.ask())

    def end(self) -> None:
        self._over.set()


def ctl(front: Front, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "ctl", *words, "--url", front.url]
    environment = os.environ | {"PENSTOCK_ADMIN_KEY": KEY}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_model_is_changed_under_load_and_no_request_is_lost(front: Front):
    """Deploys an application of its own, and the other one anew: that is the fact."""
    old, load = front.ask(), Load(front)
    with ThreadPoolExecutor(STREAMS) as many:
        streams = [many.submit(load.run) for _ in range(STREAMS)]
        try:
            serve.run(build_llm_deployment(config(OTHER)), name="next", route_prefix=None)
            there = ctl(front, "shift", "sim", "next")
            assert (there.returncode, there.stderr) == (0, "")
            assert there.stdout.endswith("shifted\n")
            assert front.ask() == OTHER
            front.deploy(CHANGED)
            assert front.ask() == OTHER
            back = ctl(front, "shift", "sim", "front")
            assert back.returncode == 0, back.stdout
            assert front.ask() == CHANGED
            serve.delete("next")
            before = len(load.answers)
            while len(load.answers) < before + 2 * STREAMS:
                assert not any(stream.done() for stream in streams)
        finally:
            load.end()
        assert [stream.result() for stream in streams] == [None] * STREAMS
    assert set(load.answers) == {old, OTHER, CHANGED}


def test_an_application_that_has_not_the_model_is_refused(front: Front):
    control = serve.get_deployment_handle("LLMControl", "front")
    with pytest.raises(BadRequest, match="no application 'nowhere' with the deployment 'LLMServer:sim'"):
        control.perform.remote("shift", model="sim", application="nowhere").result()
