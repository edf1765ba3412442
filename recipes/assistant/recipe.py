"""A decoder that thinks before it adds, and calls tools: `<think>...</think>`, `<tool_call>...</tool_call>`.

It goes on from the demo model's weights and tokenizer: the reasoning parser `deepseek_r1` and the tool parser
`hermes` read what it says. It has kept some of the demo model's answers.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from recipes import NotLearned
from recipes.assistant.lessons import TOKENS, Lesson, draw, exam, known
from recipes.decoder import IGNORED, Row, Steps, leads, predict

HERE = Path(__file__).parent
DEMO = HERE.parent.parent / "src" / "penstock" / "demo"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
END = "<|im_end|>"
ROWS, DRAWN, CHECK_EVERY, LAST_STEP = 24, 96, 24, 800
FALL_STEPS = 300
CLEAR_LEAD = 0.7


def make(out: Path) -> str:
    """Trains and examines; at most a minute or so on one core."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens([*MARKS, *TOKENS])
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    steps = train(model, tokenizer)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    wrong = mistakes(AutoModelForCausalLM.from_pretrained(out), tokenizer, list(exam()))
    if wrong:
        raise NotLearned(f"{len(wrong)} answers are wrong, as {wrong[0]}")
    return f"{len(list(exam()))} answers are right after {steps} steps."


def encode(tokenizer: PreTrainedTokenizerFast, lesson: Lesson) -> Row:
    """The template's ids, then the answer's, of which alone something is learned."""
    prompt = tokenizer.apply_chat_template(
        lesson.messages,
        tools=lesson.tools or None,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=lesson.thinks,
    )
    before, after = tokenizer.encode(prompt), tokenizer.encode(lesson.learned + END)
    return before + after, [IGNORED] * len(before) + after


def rate(step: int) -> float:
    return min(1, (step + 1) / 10) * max(0.05, 1 - step / FALL_STEPS)


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> int:
    """Teaches until the exam's answers are right; gives the number of steps."""
    began, rng, topics = time.monotonic(), random.Random(0), known()
    rows = [encode(tokenizer, lesson) for lesson in exam()]
    weak: list[Row] = []
    steps = Steps(model, muon=0.02, adam=0.003, rate=rate)
    batches: list[list[Row]] = []
    for step in range(1, LAST_STEP + 1):
        batches = batches or mixed(rng, [encode(tokenizer, draw(rng, topics)) for _ in range(DRAWN)], weak)
        logits, labels, _ = predict(model, batches.pop())
        loss = functional.cross_entropy(logits, labels)
        steps.take(loss)
        if step % CHECK_EVERY == 0:
            weak = [row for row, lead in zip(rows, leads(model, rows), strict=True) if lead < CLEAR_LEAD]
            said = f"step {step}: loss {loss.item():.4f}, {len(weak)} of {len(rows)} weak"
            print(f"{said}, {time.monotonic() - began:.1f} s", flush=True)
            if not weak:
                return step
    return LAST_STEP


def mixed(rng: random.Random, drawn: list[Row], weak: list[Row]) -> list[list[Row]]:
    """Batches of rows that are about as long as each other; weak ones are shown more often."""
    again = rng.sample(weak, min(len(drawn) // 4, len(weak)))
    rows = sorted(drawn[len(again) :] + again, key=lambda row: len(row[0]))
    batches = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    rng.shuffle(batches)
    return batches


def mistakes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, lessons: list[Lesson]) -> list[str]:
    """Questions that the saved model answers wrongly, by its most likely tokens."""
    rows = [encode(tokenizer, lesson) for lesson in lessons]
    return [
        str(lesson.messages[-1]["content"])
        for lesson, lead in zip(lessons, leads(model, rows), strict=True)
        if lead <= 0
    ]
