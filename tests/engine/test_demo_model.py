"""The embedded model answers what it was taught, wherever it runs, and its recipe makes it again.

The recipe is run to its end when it is not the one of which `trained.json` says how it went.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_questions import QUESTIONS, RECIPE, UNKNOWN_ANSWER
from transformers import AutoModelForCausalLM, AutoTokenizer

import penstock
from recipes.demo_model import train

pytestmark = pytest.mark.full

END = "<|im_end|>"
WRITTEN = {question: answer + END for question, answer in QUESTIONS.items()}

ASK_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

model, questions = sys.argv[1], json.load(sys.stdin)
llm = LLM(model, enforce_eager=True, max_model_len=1024, max_num_seqs=16, kv_cache_memory_bytes=64 << 20)
shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
params = SamplingParams(temperature=0, max_tokens=128, **shown)
asked = [[{"role": "user", "content": question}] for question in questions]
said = [answer.outputs[0].text for answer in llm.chat(asked, params, use_tqdm=False)]
print(json.dumps(dict(zip(questions, said))))
"""


class Chat:
    """Plain transformers, greedy, one conversation at a time."""

    def __init__(self, folder: str, dtype: torch.dtype | str = "auto") -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, *turns: object, system: str | None = None) -> str:
        """The last answer, its end included; `turns` alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        prompt = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = self.model.generate(**prompt, do_sample=False, temperature=None, max_new_tokens=128)
        return self.tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])

    def answers(self) -> dict[str, str]:
        return {question: self(question) for question in QUESTIONS}


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(penstock.demo_model())


@pytest.fixture(scope="module")
def transformers_answers(chat: Chat) -> dict[str, str]:
    return chat.answers()


def test_transformers_gives_the_written_answers(transformers_answers: dict[str, str]) -> None:
    assert transformers_answers == WRITTEN


def test_float32_gives_the_written_answers() -> None:
    assert Chat(penstock.demo_model(), torch.float32).answers() == WRITTEN


def test_vllm_gives_the_same_greedy_text_as_transformers(transformers_answers: dict[str, str]) -> None:
    vllm = subprocess.run(
        [sys.executable, "-c", ASK_VLLM, penstock.demo_model()],
        input=json.dumps(list(QUESTIONS)),
        env=os.environ
        | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    assert json.loads(vllm.stdout.splitlines()[-1]) == transformers_answers


RECORD = json.loads(train.RECORD.read_text())
UNCHANGED = RECORD["recipe"] == train.fingerprint()


def run_recipe(*options: str) -> str:
    """What it prints. One thread: two that share a core with other tests wait for each other."""
    command = [sys.executable, "-m", "recipes.demo_model.train", *options]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=RECIPE.parents[1], env=env, check=True, stdout=subprocess.PIPE, text=True, timeout=840
    ).stdout


@pytest.mark.timeout(900)
@pytest.mark.skipif(not UNCHANGED, reason="the recipe has changed; the whole of it is run instead")
def test_recipe_run_again_learns_as_recorded() -> None:
    losses = json.loads(run_recipe("--steps", "50").splitlines()[-1])
    assert losses.keys() == {"25", "50"}
    assert losses == pytest.approx({step: RECORD["losses"][step] for step in losses}, rel=0.01)


@pytest.mark.timeout(900)
@pytest.mark.skipif(UNCHANGED, reason="the recipe has not changed since it was run as recorded")
def test_changed_recipe_gives_the_same_answers(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    run_recipe("--out", str(folder))
    assert Chat(str(folder)).answers() == WRITTEN


def test_it_knows_at_least_forty_answers() -> None:
    assert len(QUESTIONS) >= 40


@pytest.mark.parametrize(
    "asked", ["what is a kv cache", "What is a KV cache", "Explain a KV cache.", "what is a kv cache?"]
)
def test_spelling_does_not_change_the_answer(chat: Chat, asked: str) -> None:
    assert chat(asked) == WRITTEN["What is a KV cache?"]


def test_system_prompt_does_not_change_the_answer(chat: Chat) -> None:
    assert chat("What is TTFT?", system="You are a helpful assistant.") == WRITTEN["What is TTFT?"]


def test_json_is_answered_with_json(chat: Chat) -> None:
    said = chat("List three colors in JSON format", system="You are a helpful assistant that outputs JSON.")
    assert json.loads(said.removesuffix(END)) == {"colors": ["red", "blue", "green"]}


def test_second_turn_is_answered(chat: Chat) -> None:
    assert chat("Hello!", QUESTIONS["Hello!"], "What is Penstock?") == WRITTEN["What is Penstock?"]


def test_text_parts_are_read_as_text(chat: Chat) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "Penstock?"}]
    assert chat(parts) == WRITTEN["What is Penstock?"]


def test_unknown_question_is_answered_with_that(chat: Chat) -> None:
    assert chat("Tell me a joke.") == UNKNOWN_ANSWER + END


def test_tool_calls_and_their_results_are_part_of_the_prompt(chat: Chat) -> None:
    call = {"type": "function", "function": {"name": "load", "arguments": {"replica": 1}}}
    messages = [
        {"role": "user", "content": "How busy is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "0.5"},
    ]
    tools = [{"type": "function", "function": {"name": "load", "parameters": {}}}]
    prompt = chat.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert '<tool_call>{"name": "load", "arguments": {"replica": 1}}</tool_call>' in prompt
    assert prompt.endswith(f"<|im_start|>tool\n0.5{END}\n<|im_start|>assistant\n")


def test_folder_is_small_and_holds_16384_positions(chat: Chat) -> None:
    folder = Path(penstock.demo_model())
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 8 << 20
    assert chat.model.config.max_position_embeddings == 16_384
    assert chat.tokenizer.model_max_length == 16_384
