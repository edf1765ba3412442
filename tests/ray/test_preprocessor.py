"""A preprocessor as a deployment of its own, with a recording engine: scaled, killed, and out of order."""

import asyncio
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import numpy as np
import pytest
from ray import cloudpickle, serve
from tests.waiting import wait_until

from penstock.config import LLMConfig
from penstock.engines.sim.engine import SimEngine
from penstock.serve import GatewayConfig, LLMRouter, LLMServer

pytestmark = pytest.mark.parity("X13")

MARK = np.arange(500_000, dtype=np.float32)  # 2 MB: over Ray's limit for small results


class Tells(SimEngine):
    """Answers with what it knows of the prompt's picture."""

    def generate(self, prompt, params, **more):
        if "multi_modal_data" in prompt:
            image = prompt["multi_modal_data"]["image"]
            if isinstance(image, list):
                image[0] += 1  # what has arrived is one's own
                return super().generate(f"{image}", params, **more)
            if hasattr(image, "getpixel"):
                return super().generate(f"{image.size} {image.getpixel((29, 19))}", params, **more)
            said = f"{prompt['prompt']} {type(image).__name__} {image.nbytes} {image.sum():.0f} {os.getpid()}"
            prompt = said
        return super().generate(prompt, params, **more)


class TellingServer(LLMServer):
    """An own class that hands on what the deployment gives it."""

    async def __init__(self, llm_config, **more):
        await super().__init__(llm_config, engine_cls=Tells, **more)


class Strange:
    """Can be sent, but not be received."""

    def __reduce__(self):
        return int, ("no number",)


class Draws:
    """Runs where no engine is; a file says which process is to die at which request."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __call__(self, request, context):
        text = request["messages"][-1]["content"]
        if text == "die once" and not (self.folder / "died").exists():
            (self.folder / "died").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "die always":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "refuse":
            raise ValueError("No pictures on Sundays.")
        if text == "torch":
            import torch

            tensors = [torch.arange(12.0).reshape(3, 4), torch.ones(())]
            return {"prompt": "x", "multi_modal_data": {"image": tensors}}
        if text == "PIL":
            from PIL import Image

            return {"prompt": "x", "multi_modal_data": {"image": Image.new("RGB", (30, 20), "red")}}
        if text == "strange":
            return {"prompt": "x", "multi_modal_data": {"image": Strange()}}
        if text == "wait":
            return self.wait()
        if text == "unsendable":
            return {"prompt": "x", "multi_modal_data": {"image": threading.Lock()}}
        context.notes["pid"] = os.getpid()
        return {"prompt": f"{os.getpid()}", "multi_modal_data": {"image": MARK}}

    async def wait(self):
        (self.folder / "began").touch()
        try:
            await asyncio.Event().wait()
        finally:
            (self.folder / "ended").touch()


class Gate:
    """Holds every request until a file is there; then says who held it."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    async def __call__(self, request):
        while not self.file.exists():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.05)
        return {"prompt": f"{os.getpid()}"}


def with_pid(answer, context):
    answer["preprocessed_by"] = context.notes.get("pid")
    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("draws")


@pytest.fixture(scope="module")
def url(serve_url, folder):
    """An application of its own: two models, whose preprocessors are deployments."""
    fixed = {"arguments": {"folder": str(folder)}, "num_replicas": 2, "health_check_period_s": 1.0}
    scaling = {
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.5,
        "metrics_interval_s": 0.2,
        "look_back_period_s": 1,
    }
    scaled = {"arguments": {"file": f"{folder}/go"}, "autoscaling_config": scaling, "max_ongoing_requests": 2}
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    configs = [
        model("m", Draws, fixed, server_cls=TellingServer, postprocessor=with_pid),
        model("scaled", Gate, scaled),
    ]
    app = LLMRouter.as_deployment().bind(configs, GatewayConfig())
    serve.run(app, name="pre", route_prefix="/pre")
    yield f"{serve_url}/pre"
    serve.delete("pre")


def model(model_id, preprocessor, options, **more):
    return LLMConfig(
        model_loading_config={"model_id": model_id},
        llm_engine="sim",
        preprocessor=preprocessor,
        preprocessor_options={"ray_actor_options": {"num_cpus": 0.1}, **options},
        **more,
    )


def ask(url: str, text: str, model: str = "m") -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=question(text, model), timeout=100)


def question(text: str, model: str = "m") -> dict:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


def test_what_it_makes_reaches_the_engine_in_another_process(url):
    answer = ask(url, "hello").json()
    maker, kind, size, total, engine = answer["choices"][0]["message"]["content"].split()
    assert (kind, int(size)) == ("ndarray", MARK.nbytes)
    assert float(total) == float(f"{MARK.sum():.0f}")
    assert maker != engine
    assert answer["preprocessed_by"] == int(maker)


def test_its_deployment_has_the_replicas_that_were_asked_for(url):
    assert running("m") == 2


def test_a_refusal_crosses_processes(url):
    answer = ask(url, "refuse")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "No pictures on Sundays."


def test_what_cannot_be_sent_is_an_error_of_the_operators(url):
    answer = ask(url, "unsendable")
    assert answer.status_code == 500
    assert "cannot be sent" in answer.json()["error"]["message"]


def test_what_cannot_be_received_is_one_too(url):
    answer = ask(url, "strange")
    assert answer.status_code == 500
    assert "cannot be sent" in answer.json()["error"]["message"]


def test_tensors_and_pictures_arrive_as_they_were(url):
    torch = pytest.importorskip("torch")
    said = ask(url, "torch").json()["choices"][0]["message"]["content"]
    assert said == f"{[torch.arange(12.0).reshape(3, 4) + 1, torch.ones(())]}"
    said = ask(url, "PIL").json()["choices"][0]["message"]["content"]
    assert said == "(30, 20) (255, 0, 0)"


def test_a_client_that_leaves_ends_the_work_in_the_deployment(url, folder):
    address = httpx.URL(url)
    client = HTTPConnection(address.host, address.port)
    client.request("POST", f"{address.path}/v1/chat/completions", json.dumps(question("wait")))
    wait_until(lambda: (folder / "began").exists())
    assert not (folder / "ended").exists()
    client.close()
    wait_until(lambda: (folder / "ended").exists())


def test_a_killed_replica_loses_no_request(url):
    answer = ask(url, "die once")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"][0]["message"]["content"].split()) == 5


def test_a_request_that_kills_three_replicas_is_given_up(url):
    answer = ask(url, "die always")
    assert answer.status_code == 500
    assert "3 replicas" in answer.json()["error"]["message"]
    assert ask(url, "hello again").status_code == 200


def running(model: str) -> int:
    return serve.status().applications["pre"].deployments[f"Preprocessor:{model}"].replica_states["RUNNING"]


def test_load_scales_it_from_one_replica_to_two(url, folder):
    assert running("scaled") == 1
    try:
        with ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(ask, url, "hello", "scaled") for _ in range(8)]
            wait_until(lambda: running("scaled") == 2)
            (folder / "go").touch()
            answers = [one.result().json() for one in asked]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 2
    finally:
        (folder / "go").touch()
