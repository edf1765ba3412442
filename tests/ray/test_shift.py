"""A model's requests go to another application's replicas and back, and none of them fails."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from ray import serve

from penstock.errors import BadRequest
from penstock.serve import LLMConfig, build_llm_deployment, build_openai_app

pytestmark = [pytest.mark.parity("S24"), pytest.mark.parity("S25")]

KEY = "admin's own"
STREAMS = 4
OLD, OTHER, CHANGED = "the first one says", "the other one says", "the changed one says"


def config(reply: str) -> LLMConfig:
    loading = {"model_id": "sim"}
    return LLMConfig(model_loading_config=loading, llm_engine="sim", engine_kwargs={"reply": reply})


class Load:
    """Streams without pause, each of some twenty tokens."""

    def __init__(self, url: str) -> None:
        self.client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
        self.answers: list[str] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            self.answers.append(self.ask())

    def ask(self) -> str:
        stream = self.client.completions.create(model="sim", prompt="hello", max_tokens=20, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    def end(self) -> None:
        self._over.set()


def deploy(reply: str) -> None:
    gateway = {"admin_key": KEY}
    serve.run(build_openai_app({"llm_configs": [config(reply)], "gateway": gateway}), name="front")


@pytest.fixture(scope="module")
def url(serve_url: str) -> Iterator[str]:
    deploy(OLD)
    yield serve_url
    serve.delete("front")


def ctl(url: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli", "ctl", *words, "--url", url]
    environment = os.environ | {"PENSTOCK_ADMIN_KEY": KEY}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_model_is_changed_under_load_and_no_request_is_lost(url: str):
    load = Load(url)
    with ThreadPoolExecutor(STREAMS) as many:
        streams = [many.submit(load.run) for _ in range(STREAMS)]
        try:
            serve.run(build_llm_deployment(config(OTHER)), name="next", route_prefix=None)
            there = ctl(url, "shift", "sim", "next")
            assert (there.returncode, there.stderr) == (0, "")
            assert there.stdout.endswith("shifted\n")
            assert load.ask() == OTHER
            deploy(CHANGED)
            assert load.ask() == OTHER
            back = ctl(url, "shift", "sim", "front")
            assert back.returncode == 0, back.stdout
            assert load.ask() == CHANGED
            serve.delete("next")
            before = len(load.answers)
            while len(load.answers) < before + 2 * STREAMS:
                assert not any(stream.done() for stream in streams)
        finally:
            load.end()
        assert [stream.result() for stream in streams] == [None] * STREAMS
    assert set(load.answers) == {OLD, OTHER, CHANGED}


def test_an_application_that_has_not_the_model_is_refused(url: str):
    control = serve.get_deployment_handle("LLMControl", "front")
    with pytest.raises(BadRequest, match="no application 'nowhere' with the deployment 'LLMServer:sim'"):
        control.perform.remote("shift", model="sim", application="nowhere").result()
