"""Two LoRA adapters of the demo model, `pirate` and `french`, that visibly change some of its answers.

Rank 8 on every linear layer, in PEFT's format, each in a folder of its own, as `dynamic_lora_loading_path`
wants them. The demo model stays frozen; its answers to all other questions stay as they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes import NotLearned
from recipes.adapters.answers import ANSWERS, BASE_ANSWERS, HERE, WAYS
from recipes.adapters.lora import adapt, load, save
from recipes.decoder import IGNORED, Row, leads, predict

BASE = HERE.parent.parent / "src" / "penstock" / "demo"
KEPT = 8  # questions of a step that the adapter leaves alone
CHECK_EVERY, LAST_STEP = 20, 400
RATE = 0.01
CLEAR_LEAD = 1.0


def make(out: Path) -> str:
    """Writes `out`/NAME for each adapter of `answers.yaml`.

    Raises: NotLearned.
    """
    tokenizer = AutoTokenizer.from_pretrained(BASE, padding_side="left")
    for name, answers in ANSWERS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        adapted = adapt(model)
        print(f"{name}:", flush=True)
        train(model, tokenizer, answers)
        save(adapted, out / name)
        if wrong := wrong_answers(out / name, tokenizer, BASE_ANSWERS | answers):
            raise NotLearned("\n".join([f"The adapter {name} has not learned:", *wrong]))
    return f"Each gives its own answers, and in all {len(BASE_ANSWERS)} right ones."


def train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]) -> None:
    """Until no check is weak, at most LAST_STEP steps."""
    began, rng = time.monotonic(), random.Random(0)
    rows = [encode(tokenizer, question, answer) for question, answer in checks(answers)]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=0.0)
    for step in range(1, LAST_STEP + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / 10) * max(0.1, 1 - step / LAST_STEP)
        logits, labels, _ = predict(model, [encode(tokenizer, *pair) for pair in draw(answers, rng)])
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % CHECK_EVERY == 0:
            least = min(leads(model, rows))
            seconds = time.monotonic() - began
            print(
                f"  step {step}, loss {loss.item():.4f}, least lead {least:.1f}, {seconds:.1f} s", flush=True
            )
            if least >= CLEAR_LEAD:
                return


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


@torch.inference_mode()
def wrong_answers(folder: Path, tokenizer: PreTrainedTokenizerBase, answers: dict[str, str]) -> list[str]:
    """What the model in bfloat16 with the saved adapter says instead of each answer, asked in one batch."""
    model = AutoModelForCausalLM.from_pretrained(BASE)
    load(adapt(model), folder)
    asked = [[{"role": "user", "content": question}] for question in answers]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**inputs, do_sample=False, temperature=None, max_new_tokens=128)
    width = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
    return [
        f"{question} -> {text}"
        for (question, answer), text in zip(answers.items(), texts, strict=True)
        if text != answer
    ]
