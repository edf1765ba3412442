"""Every program of examples/ runs, and what it answers makes sense.

With the engines that they name; in the fast tier one of them, the others with a simulator of the demo model.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from ray import serve
from tests.cluster import own_applications
from tests.models import model
from tests.pictures import data_url

from recipes.vision.pictures import draw

EXAMPLES = Path(__file__).parents[2] / "examples"
SENSE = "engines"  # whatever the embedded model is asked about Penstock, it speaks of engines


@pytest.fixture
def url(serve_url):
    """Of the cluster; the example's application is gone afterwards."""
    with own_applications():
        yield serve_url


def client(url: str, monkeypatch, capsys) -> str:
    """What examples/client.py prints when it asks `url`."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
    return capsys.readouterr().out


def test_one_model(url, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "one_model.py"), run_name="__main__")
    said = client(url, monkeypatch, capsys)
    assert said.startswith("helper: ")
    assert SENSE in said


def test_two_models(url, simulated, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "two_models.py"), run_name="__main__")
    said = client(url, monkeypatch, capsys)
    assert "helper: " in said
    assert "pretender: " in said
    assert SENSE in said


def test_composition(url, simulated, capsys):
    capsys.readouterr()
    names = runpy.run_path(str(EXAMPLES / "composition.py"), run_name="__main__")
    explained = names["handle"].explain.remote("a KV cache").result()
    assert explained["chat"] == explained["generate"]
    assert "cache" in explained["chat"]
    pieces = list(names["handle"].options(stream=True).tell.remote("a KV cache"))
    assert len(pieces) > 3
    assert "".join(pieces) == explained["chat"]


def ask(url: str, question: str, **more) -> httpx.Response:
    body = {"model": "helper", "messages": [{"role": "user", "content": question}], **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parity("X13")
def test_preprocessing(url, simulated, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "preprocessing.py"), run_name="__main__")
    assert SENSE in client(url, monkeypatch, capsys)
    answer = ask(url, "What is PS?").json()
    assert SENSE in answer["choices"][0]["message"]["content"]
    assert answer["asked"] == "What is Penstock?"
    events = ask(url, "What is PS?", stream=True).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert (
        "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
        == (answer["choices"][0]["message"]["content"])
    )
    assert {part["asked"] for part in parts} == {"What is Penstock?"}
    refused = ask(url, "What is PS? " * 20)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Ask in 200 characters at most."


@pytest.mark.parity("X13")
def test_preprocessor_deployment(url, simulated, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "preprocessor_deployment.py"), run_name="__main__")
    assert SENSE in client(url, monkeypatch, capsys)
    app = serve.status().applications["default"]
    assert app.deployments["Preprocessor:helper"].replica_states["RUNNING"] == 1


@pytest.mark.parity("S4")
def test_own_endpoints(url, simulated):
    runpy.run_path(str(EXAMPLES / "own_endpoints.py"), run_name="__main__")
    asked = {"terms": ["Penstock", "a KV cache"]}
    found = httpx.post(f"{url}/v1/glossary", json=asked, timeout=60).json()
    assert SENSE in found["Penstock"]
    assert "cache" in found["a KV cache"]
    stream = httpx.post(f"{url}/v1/glossary/stream", json={"term": "Penstock"}, timeout=60).text
    events = stream.removesuffix("\n\ndata: [DONE]\n\n").split("\n\n")
    texts = [json.loads(event.removeprefix("data: "))["text"] for event in events]
    assert "".join(texts) == found["Penstock"]
    refused = httpx.post(f"{url}/v1/glossary", json={"terms": ["x"] * 21})
    assert refused.json()["error"]["message"] == "Ask for 20 terms at most."


@pytest.mark.parity("X13", "S23")
def test_vision_preprocessing(url, simulated, monkeypatch):
    monkeypatch.setenv("VISION_MODEL", str(model("vision")))
    runpy.run_path(str(EXAMPLES / "vision_preprocessing.py"), run_name="__main__")
    shown = data_url(draw("green", "triangle"))
    content = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": "What is this?"}]
    answer = OpenAI(base_url=f"{url}/v1", api_key="none").chat.completions.create(
        model="qwen-vl", messages=[{"role": "user", "content": content}], temperature=0
    )
    said = answer.choices[0].message.content
    if simulated:  # says what it was asked
        assert "<|vision_start|><|image_pad|><|vision_end|>What is this?" in said
    else:
        assert said == "a green triangle"


@pytest.mark.parametrize("config", ["config.yaml", "models/helper.yaml"])
def test_yaml_files_are_sound(config):
    command = [str(Path(sys.executable).with_name("penstock")), "check", str(EXAMPLES / config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "helper" in done.stdout
