"""Every program of examples/ runs, with the engine it names, and what it answers makes sense."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from ray import serve

EXAMPLES = Path(__file__).parents[2] / "examples"
SENSE = "engines"  # whatever the embedded model is asked about Penstock, it speaks of engines


@pytest.fixture(autouse=True)
def no_application_stays(serve_url):
    yield
    for name in list(serve.status().applications):
        serve.delete(name)


def client(url: str, monkeypatch, capsys) -> str:
    """What examples/client.py prints when it asks `url`."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
    return capsys.readouterr().out


def test_one_model(serve_url, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "one_model.py"), run_name="__main__")
    said = client(serve_url, monkeypatch, capsys)
    assert said.startswith("helper: ")
    assert SENSE in said


def test_two_models(serve_url, monkeypatch, capsys):
    runpy.run_path(str(EXAMPLES / "two_models.py"), run_name="__main__")
    said = client(serve_url, monkeypatch, capsys)
    assert "helper: " in said
    assert "pretender: " in said
    assert SENSE in said


def test_composition(serve_url, capsys):
    capsys.readouterr()
    names = runpy.run_path(str(EXAMPLES / "composition.py"), run_name="__main__")
    explained = names["handle"].explain.remote("a KV cache").result()
    assert explained["chat"] == explained["generate"]
    assert "cache" in explained["chat"]


@pytest.mark.parametrize("config", ["config.yaml", "models/helper.yaml"])
def test_yaml_files_are_sound(config):
    command = [str(Path(sys.executable).with_name("penstock")), "check", str(EXAMPLES / config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "helper" in done.stdout
