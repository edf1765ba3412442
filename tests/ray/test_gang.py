"""Engines that compute together, each in a replica of its own: they start, answer, die and return at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from demo_questions import QUESTIONS
from models import model
from openai import OpenAI
from ray import serve

from penstock.serve import build_dp_openai_app

pytestmark = [pytest.mark.full, pytest.mark.parity("S24", "S3")]

QUESTION, ANSWER = next(iter(QUESTIONS.items()))


@pytest.fixture(scope="module")
def client(serve_url):
    """Two engines of its own: no other model is one of experts."""
    config = {
        "model_loading_config": {"model_id": "moe", "model_source": str(model("moe"))},
        "engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": True, "max_model_len": 512},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"ray_actor_options": {"num_cpus": 1}},
    }
    args = {"llm_config": config, "gateway": {"wait_for_replica_s": 200}}
    serve.run(build_dp_openai_app(args), name="gang")
    yield OpenAI(base_url=f"{serve_url}/v1", api_key="any", max_retries=0, timeout=280)
    serve.delete("gang")


def replicas() -> set[psutil.Process]:
    """By the titles that Serve gives their processes."""
    return {
        process
        for process in psutil.process_iter()
        if "ray::ServeReplica:gang:LLMServer:moe" in "".join(_words(process))
    }


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def ask(client: OpenAI) -> str:
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model="moe", messages=messages).choices[0].message.content


def test_one_gang_is_as_many_replicas_and_each_answers(client):
    assert len(replicas()) == 2
    with ThreadPoolExecutor(8) as many:
        answers = list(many.map(lambda _: ask(client), range(8)))
    assert answers == [ANSWER] * 8


def test_when_one_engine_dies_the_whole_gang_returns_and_no_request_fails(client):
    before = replicas()
    one = min(before, key=lambda process: process.pid)
    with ThreadPoolExecutor(4) as many:
        asked = [many.submit(ask, client) for _ in range(4)]
        assert [request.result() for request in asked] == [ANSWER] * 4
        (core,) = one.children()
        core.kill()
        assert psutil.wait_procs(before, timeout=10)[1] == []
        asked = [many.submit(ask, client) for _ in range(4)]
        assert [request.result() for request in asked] == [ANSWER] * 4
    assert len(replicas()) == 2
