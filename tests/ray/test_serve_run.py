"""`penstock.serve.run` in programs of their own, with a Ray of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray import serve as ray_serve
from tests.cluster import Cluster
from tests.ports import unused

import penstock.data
from penstock import serve
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
SIMULATED = """
import httpx
from penstock.serve import run

model = {"model_loading_config": {"model_id": "m"}, "llm_engine": "sim", "engine_kwargs": {"reply": "here"}}
with run(model, port=PORT, name="of-a-program") as service:
    asked = {"model": "m", "prompt": "hello"}
    print(httpx.post(f"{service.url}/v1/completions", json=asked).json()["choices"][0]["text"])
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
    try:
        run(good, port=1)
    except Exception as error:
        print(type(error).__name__, error)
    with run(good, port=PORT):
        pass
    asked = {"model": "good", "prompt": "still there?"}
    print(httpx.post(f"{service.url}/v1/completions", json=asked).json()["choices"][0]["text"])
"""


def program(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text.replace("PORT", str(unused())))
    free = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | environment
    return subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=free, capture_output=True, text=True, timeout=280
    )


def test_on_a_cluster_of_others_it_ends_its_own_service_only(tmp_path: Path, cluster: Cluster, toy: str):
    done = program(tmp_path, SIMULATED, RAY_ADDRESS=cluster.address)
    assert "here" in done.stdout.splitlines(), done.stderr  # Ray may warn there of a busy cluster
    found = ray_serve.status().applications
    assert (found[toy].status, "of-a-program" in found) == ("RUNNING", False)


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
    *failures, other, answer = done.stdout.splitlines()
    assert other.startswith(
        "ConfigError A `with` block of this program serves 'penstock' at http://127.0.0.1:"
    )
    why = "EngineStartFailed Model 'demo' cannot start: '/nowhere' does not exist on this node"
    assert [one.startswith(why) for one in failures] == [True, True]
    assert "here" in answer
    assert done.stderr == ""


MODEL = {"model_loading_config": {"model_id": "m"}, "llm_engine": "sim"}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: run(), "Name a model"),
        (lambda: run(MODEL, gateway={"prot": 1}), "gateway.prot: unknown key 'prot'; did you mean 'port'?"),
        (lambda: run(MODEL, gateway=3), "gateway: is the number 3; must be a mapping"),
        (lambda: run(MODEL, port=99999), "gateway.port: is 99999; must be at most 65535"),
        (
            lambda: serve.ModelLoadingConfig(model_idd="m"),
            "unknown key 'model_idd'; did you mean 'model_id'?",
        ),
        (lambda: serve.LoraConfig(path="m"), "unknown key 'path'"),
        (lambda: serve.build_llm_deployment({"llm_engin": "sim"}), "llm_config.llm_engin: unknown key"),
        (lambda: penstock.LLM(config={"llm_engin": "sim"}), "config.llm_engin: unknown key"),
        (lambda: penstock.data.batch("in", "out", config={"a": 1}), "config.a: unknown key"),
    ],
)
def test_a_wrong_argument_is_the_sentence_that_a_file_gets(call, says: str):
    with pytest.raises(ConfigError) as refused:
        call()
    assert says in str(refused.value)
