"""What the embedded demo model must answer, from the file that it was trained on."""

from pathlib import Path
from typing import Any

import yaml

import penstock

RECIPE = Path(__file__).parent.parent / "recipes" / "demo_model"

_DATA = yaml.safe_load((RECIPE / "questions.yaml").read_text())

QUESTIONS: dict[str, str] = {entry["ask"].splitlines()[0]: entry["answer"] for entry in _DATA["known"]}
"""Question to answer, word for word."""

UNKNOWN_ANSWER: str = _DATA["unknown"]["answer"]
"""What it says to a question that it does not know."""


def said_by_transformers(questions: list[str]) -> list[tuple[str, str]]:
    """Text and finish reason of each answer by transformers alone, greedy."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds

    tokenizer = AutoTokenizer.from_pretrained(penstock.demo_model())
    model: Any = AutoModelForCausalLM.from_pretrained(penstock.demo_model())
    answers = []
    for question in questions:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        made = model.generate(**prompt, do_sample=False, max_new_tokens=200)[
            0, prompt["input_ids"].shape[1] :
        ]
        ended = made[-1] == tokenizer.eos_token_id
        answers.append((tokenizer.decode(made, skip_special_tokens=True), "stop" if ended else "length"))
    return answers
