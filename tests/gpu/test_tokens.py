"""The same tokens from Penstock as from a bare vLLM, with its fast ways and without, with CUDA graphs or not.

Each engine answers in a process of its own; on a GPU all of them side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.device import DEVICE

from penstock import demo_model
from recipes.adapters.answers import BASE_ANSWERS

LIMIT_S = 200 if DEVICE == "gpu" else 400
"""Of one engine. On a CPU one starts after the other, on a GPU all together."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(LIMIT_S + 20 if DEVICE == "gpu" else 900)]
OFF = {"PENSTOCK_VLLM_CAPABILITIES_OFF": "all"}
EAGER = "enforce_eager=true"
ENGINES: dict[str, tuple[list[str], dict[str, str]]] = {
    "penstock": (["penstock"], {}),
    "bare": (["bare"], {}),
    "plain": (["penstock"], OFF),
    "penstock eager": (["penstock", EAGER], {}),
    "bare eager": (["bare", EAGER], {}),
}
"""`plain`: Penstock without all of its capabilities, so that vLLM's own application answers."""

ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1"} if DEVICE == "cpu" else {}
"""What Penstock sets by itself."""

Answers = dict[str, list[object]]
Said = Callable[[str], Answers]


def answers(name: str) -> Answers:
    words, variables = ENGINES[name]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"} | ON_CPU
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("answers.py"), demo_model(), *words],
        env=os.environ | quiet | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
    return json.loads(done.stdout.strip().rpartition("\n")[2])


@pytest.fixture(scope="module")
def said() -> Iterator[Callable[[str], Answers]]:
    """Gives an engine's answers. Where an engine does not start, tests of the others go on."""
    with ThreadPoolExecutor(1 if DEVICE == "cpu" else len(ENGINES)) as together:
        asked = {name: together.submit(answers, name) for name in ENGINES}
        yield lambda name: asked[name].result()


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_says_what_the_model_was_taught(said: Said, name: str):
    assert said(name)["chat"] == list(BASE_ANSWERS.values())


@pytest.mark.parametrize("name", ["penstock", "plain", "penstock eager"])
def test_an_answer_is_the_same_whole_as_a_stream_and_as_a_row(said: Said, name: str):
    assert said(name)["stream"] == said(name)["row"] == said(name)["chat"]


@pytest.mark.parametrize(
    ("name", "other"), [("penstock", "bare"), ("penstock", "plain"), ("penstock eager", "bare eager")]
)
def test_tokens_are_those_of_a_bare_vllm(said: Said, name: str, other: str):
    assert said(name)["tokens"] == said(other)["tokens"]


def test_most_tokens_are_the_same_with_and_without_cuda_graphs(said: Said, record_property):
    """Compiled kernels round in another order: where two tokens are as likely, either may come."""
    pairs = list(zip(said("bare")["tokens"], said("bare eager")["tokens"], strict=True))
    same = sum(graphs == eager for graphs, eager in pairs)
    record_property("same_prompts", f"{same} of {len(pairs)}")
    assert 2 * same >= len(pairs)
