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
from penstock.serve import LLMConfig, run

config = LLMConfig(model_loading_config={"model_id": "demo", "model_source": "/nowhere"})
try:
    run(config, port=PORT)
except Exception as error:
    print(type(error).__name__, error)
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
def test_a_model_that_cannot_start_is_an_error_with_its_reason(tmp_path: Path):
    done = program(tmp_path, FAILS)
    assert done.returncode == 0, done.stderr
    assert "/nowhere" in done.stdout


def test_a_service_has_a_model():
    with pytest.raises(ConfigError, match="Name a model"):
        run()
