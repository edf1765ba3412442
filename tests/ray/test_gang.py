"""Engines that compute together, each in a replica of its own: they start, answer, die and return at once."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from demo_questions import QUESTIONS
from models import model
from openai import OpenAI
from ray import serve

from penstock.serve import LLMServer, build_dp_openai_app

pytestmark = [pytest.mark.parity("S24"), pytest.mark.parity("S3")]

QUESTION, ANSWER = next(iter(QUESTIONS.items()))


class Tattler(LLMServer):
    """A server that tells its process id."""

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def client(serve_url):
    config = {
        "model_loading_config": {"model_id": "moe", "model_source": str(model("moe"))},
        "engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 512},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"ray_actor_options": {"num_cpus": 1}},
        "server_cls": Tattler,
    }
    serve.run(build_dp_openai_app({"llm_config": config}), name="gang")
    yield OpenAI(base_url=f"{serve_url}/v1", api_key="any", max_retries=0, timeout=120)
    serve.delete("gang")


def pids() -> set[int]:
    return set(serve.get_deployment_handle("LLMServer:moe", "gang").broadcast("pid").results(timeout_s=60))


def ask(client: OpenAI) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model="moe", messages=messages).choices[0].message.content


def test_one_gang_is_as_many_replicas_and_each_answers(client):
    assert len(pids()) == 2
    with ThreadPoolExecutor(8) as many:
        answers = list(many.map(lambda _: ask(client), range(8)))
    assert answers == [ANSWER] * 8


@pytest.mark.parametrize("victim", ["core", "replica"])
def test_when_one_dies_the_whole_gang_returns_and_no_request_fails(client, victim):
    before = pids()
    one = psutil.Process(min(before))
    with ThreadPoolExecutor(4) as many:
        asked = [many.submit(ask, client) for _ in range(4)]
        assert [request.result() for request in asked] == [ANSWER] * 4
        (core,) = one.children()
        os.kill(core.pid if victim == "core" else one.pid, signal.SIGKILL)
        _, left = psutil.wait_procs([psutil.Process(pid) for pid in before if psutil.pid_exists(pid)], 10)
        assert left == []
        asked = [many.submit(ask, client) for _ in range(4)]
        assert [request.result() for request in asked] == [ANSWER] * 4
    assert not before & pids()
