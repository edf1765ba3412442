"""`penstock.serve.run` in programs of their own, with a Ray of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import unused

from penstock.errors import ConfigError
from penstock.serve import run

ASKS = """
import openai, penstock
from penstock.serve import LLMConfig, run

config = LLMConfig(
    model_loading_config={"model_id": "demo", "model_source": penstock.demo_model()},
    engine_kwargs={"max_model_len": 2048},
)
with run(config, port=PORT) as service:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key="any")
    message = {"role": "user", "content": "What is Penstock?"}
    answer = client.chat.completions.create(model="demo", messages=[message], temperature=0)
    print(answer.choices[0].message.content)
service.stop()
"""
FAILS = """
import httpx
from penstock.serve import LLMConfig, run

config = LLMConfig(model_loading_config={"model_id": "demo", "model_source": "/nowhere"})
good = LLMConfig(model_loading_config={"model_id": "good"}, llm_engine="sim", engine_kwargs={"reply": "here"})

def changed(*models):
    try:
        return run(*models, port=PORT)
    except Exception as error:
        print(type(error).__name__, error)

changed(config)
with run(good, port=PORT) as service:
    changed(good, config)
    asked = {"model": "good", "prompt": "still there?"}
    print(httpx.post(f"{service.url}/v1/completions", json=asked).json()["choices"][0]["text"])
"""


def program(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text.replace("PORT", str(unused())))
    free = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=free, capture_output=True, text=True, timeout=280
    )


@pytest.mark.full
def test_a_program_serves_while_its_block_lasts_and_prints_nothing_of_others(tmp_path: Path):
    done = program(tmp_path, ASKS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Penstock feeds LLM engines.")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.full
def test_a_model_that_cannot_start_is_an_error_with_its_reason_and_ends_no_service(tmp_path: Path):
    done = program(tmp_path, FAILS)
    assert done.returncode == 0, done.stderr
    *failures, answer = done.stdout.splitlines()
    why = "EngineStartFailed Model 'demo' cannot start: '/nowhere' does not exist on this node"
    assert [one.startswith(why) for one in failures] == [True, True]
    assert "here" in answer
    assert done.stderr == ""


def test_a_service_has_a_model():
    with pytest.raises(ConfigError, match="Name a model"):
        run()
