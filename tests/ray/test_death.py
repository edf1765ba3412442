"""A replica is killed: out of the table, restarted by Serve, back without a new gateway."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from ray import serve

from penstock.serve import LLMConfig, LLMServer, build_openai_app


class Tattler(LLMServer):
    """A server that tells its process id."""

    async def pid(self) -> int:
        return os.getpid()


def deploy(replicas: int) -> None:
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        server_cls=Tattler,
        deployment_config={"num_replicas": replicas},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="mortal")


@pytest.fixture
def client(serve_url):
    yield OpenAI(base_url=f"{serve_url}/v1", api_key="any", max_retries=0, timeout=60)
    serve.delete("mortal")


def ask(client: OpenAI, words: str = "hello there") -> str:
    messages = [{"role": "user", "content": words}]
    return client.chat.completions.create(model="sim", messages=messages).choices[0].message.content


def kill_one() -> int:
    pid = serve.get_deployment_handle("LLMServer:sim", "mortal").pid.remote().result()
    os.kill(pid, signal.SIGKILL)
    return pid


def test_with_one_replica_requests_wait_for_its_restart(client):
    deploy(1)
    before = ask(client)
    killed = kill_one()
    assert ask(client) == before
    assert serve.get_deployment_handle("LLMServer:sim", "mortal").pid.remote().result() != killed


def test_with_two_replicas_no_request_fails(client):
    deploy(2)
    with ThreadPoolExecutor(8) as many:
        asked = [many.submit(ask, client, f"words {number}") for number in range(100)]
        kill_one()
        asked += [many.submit(ask, client, f"words {number}") for number in range(100)]
        answers = [request.result() for request in asked]
    assert len(answers) == 200
    assert all(answers)
