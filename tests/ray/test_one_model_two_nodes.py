"""One engine over two nodes: vLLM's workers are Ray actors, each in its bundle of the replica's group.

A cluster of its own, for the shared one has one node.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_questions import QUESTIONS
from transformers import AutoModelForCausalLM, AutoTokenizer

import penstock

pytestmark = [pytest.mark.full, pytest.mark.parity("S7", "S24")]

HERE = Path(__file__).parent
ASKED = list(QUESTIONS)[:3]


def plain(questions: list[str]) -> list[str]:
    """What the whole model says, by transformers alone, greedy."""
    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    model = AutoModelForCausalLM.from_pretrained(penstock.demo_model())
    answers = []
    for question in questions:
        talk = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            talk, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        made = model.generate(**prompt, do_sample=False, max_new_tokens=200)
        answers.append(tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_two_halves_of_a_model_on_two_nodes_answer_as_the_whole_also_after_one_was_killed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    environment.pop("RAY_ADDRESS", None)
    program = [sys.executable, str(HERE / "one_model_two_nodes.py"), json.dumps(ASKED)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(said)
    assert len(set(seen["bundles"])) == 2
    assert sorted(seen["workers"]) == sorted(seen["bundles"])
    assert seen["answers"] == seen["after"] == plain(ASKED)
