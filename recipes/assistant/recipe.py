"""A decoder that thinks before it adds, and calls tools: `<think>...</think>`, `<tool_call>...</tool_call>`.

It goes on from the demo model's weights and tokenizer: the reasoning parser `deepseek_r1` and the tool parser
`hermes` read what it says. It has kept some of the demo model's answers.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from recipes.assistant.lessons import TOKENS, Lesson, draw, exam, known
from recipes.decoder import IGNORED, Row, Steps, leads, predict
from recipes.gate import Gate

HERE = Path(__file__).parent
DEMO = HERE.parent.parent / "src" / "penstock" / "demo"
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
END = "<|im_end|>"
ROWS, DRAWN, CHECK_EVERY, LAST_STEP = 24, 96, 24, 800
FALL_STEPS = 300
CLEAR_LEAD = 0.7


def make(out: Path, seed: int) -> str:
    """Trains and examines; at most a minute or so on one core."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens([*MARKS, *TOKENS])
    tokenizer.chat_template = (HERE / "chat_template.jinja").read_text()
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = [encode(tokenizer, lesson) for lesson in exam()]
    gate = Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP)
    steps = train(model, tokenizer, rows, gate, random.Random(seed))
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return f"{gate.examine(leads(AutoModelForCausalLM.from_pretrained(out), rows))}, after {steps} steps."


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


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: list[Row],
    gate: Gate,
    rng: random.Random,
) -> int:
    """Teaches until the gate holds for the exam's `rows`; gives the number of steps."""
    topics, weak = known(), list[Row]()
    steps = Steps(model, muon=0.02, adam=0.003, rate=rate)
    batches: list[list[Row]] = []
    for step in gate.steps():
        batches = batches or mixed(rng, [encode(tokenizer, draw(rng, topics)) for _ in range(DRAWN)], weak)
        logits, labels, _ = predict(model, batches.pop())
        steps.take(functional.cross_entropy(logits, labels))
        if gate.due(step):
            found = leads(model, rows)
            weak = [row for row, lead in zip(rows, found, strict=True) if lead < gate.clear]
            if gate.holds(found):
                break
    return step


def mixed(rng: random.Random, drawn: list[Row], weak: list[Row]) -> list[list[Row]]:
    """Batches of rows that are about as long as each other; weak ones are shown more often."""
    again = rng.sample(weak, min(len(drawn) // 4, len(weak)))
    rows = sorted(drawn[len(again) :] + again, key=lambda row: len(row[0]))
    batches = [rows[first : first + ROWS] for first in range(0, len(rows), ROWS)]
    rng.shuffle(batches)
    return batches
