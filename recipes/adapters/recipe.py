"""Two LoRA adapters of the demo model, `pirate` and `french`, that visibly change some of its answers.

Rank 8 on every linear layer, in PEFT's format, each in a folder of its own, as `dynamic_lora_loading_path`
wants them. The demo model stays frozen; its answers to all other questions stay as they are.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.adapters.answers import ANSWERS, BASE_ANSWERS, HERE, WAYS
from recipes.adapters.lora import adapt, load, save
from recipes.decoder import IGNORED, Row, leads, predict
from recipes.gate import Gate

BASE = HERE.parent.parent / "src" / "penstock" / "demo"
KEPT = 8  # questions of a step that the adapter leaves alone
CHECK_EVERY, FALL_STEPS, LAST_STEP = 20, 400, 600
RATE = 0.01
CLEAR_LEAD = 1.0


def make(out: Path, seed: int) -> str:
    """Writes `out`/NAME for each adapter of `answers.yaml`.

    Raises: NotLearned.
    """
    tokenizer, said = AutoTokenizer.from_pretrained(BASE), []
    for name, answers in ANSWERS.items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        adapted = adapt(model)
        print(f"{name}:", flush=True)
        rows = [encode(tokenizer, question, answer) for question, answer in checks(answers)]
        gate = Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP)
        steps = train(model, tokenizer, answers, rows, gate, random.Random(seed))
        save(adapted, out / name)
        saved = AutoModelForCausalLM.from_pretrained(BASE)
        load(adapt(saved), out / name)
        said.append(f"{name}: {gate.examine(leads(saved, rows))}, after {steps} steps")
    return f"{'; '.join(said)}."


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    answers: dict[str, str],
    rows: list[Row],
    gate: Gate,
    rng: random.Random,
) -> int:
    """Teaches until the gate holds for `rows`; gives the number of steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    for step in gate.steps():
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / 10) * max(0.1, 1 - step / FALL_STEPS)
        logits, labels, _ = predict(model, [encode(tokenizer, *pair) for pair in draw(answers, rng)])
        functional.cross_entropy(logits, labels).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if gate.due(step) and gate.holds(leads(model, rows)):
            break
    return step


def draw(answers: dict[str, str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """One step: every changed answer, asked in some way, and a few of the others."""
    for question, answer in answers.items():
        yield rng.choice(list(spellings(question))), answer
    for question in rng.sample([other for other in BASE_ANSWERS if other not in answers], KEPT):
        yield rng.choice(WAYS[question]), BASE_ANSWERS[question]


def checks(answers: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Every changed answer in every way of asking, and all others once."""
    for question, answer in answers.items():
        yield from ((spelling, answer) for spelling in spellings(question))
    yield from ((question, answer) for question, answer in BASE_ANSWERS.items() if question not in answers)


def spellings(question: str) -> Iterator[str]:
    yield from WAYS[question]
    yield from (question.lower(), question.rstrip("?!."), question.lower().rstrip("?!."))


def encode(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> Row:
    """The chat template's ids. To be learned: the answer and that it ends."""
    asked = [{"role": "user", "content": question}]
    before = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    said = tokenizer.encode(answer + tokenizer.eos_token)
    return before + said, [IGNORED] * len(before) + said
