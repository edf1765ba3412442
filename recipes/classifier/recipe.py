"""A classifier, a tiny Qwen2 with a head of three named labels: is a sentence negative, neutral or positive?

It must read to the end: "not bad" is positive, and "good at first , later awful" is negative.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForSequenceClassification, Qwen2Tokenizer

from recipes.decoder import ahead
from recipes.gate import Gate
from recipes.reader import POSITIONS, Steps

LABELS = ("negative", "neutral", "positive")
END = "<|endoftext|>"
VOCABULARY = 512
FALL_STEPS, CHECK_EVERY, FIRST_CHECK, LAST_STEP = 300, 50, 200, 800
ROWS = 48
EXAM_SENTENCES = 900
CLEAR_LEAD = 4.0

GOOD = (
    "good",
    "great",
    "wonderful",
    "excellent",
    "lovely",
    "superb",
    "nice",
    "perfect",
    "brilliant",
    "delightful",
)
BAD = ("bad", "awful", "terrible", "poor", "horrible", "boring", "ugly", "disgusting", "broken", "useless")
PLAIN = ("blue", "square", "round", "small", "wooden", "old", "long", "red", "flat", "grey")
THINGS = ("film", "book", "meal", "hotel", "song", "phone", "chair", "room", "game", "service", "city", "car")
FRAMES = (
    "the {thing} is {word}",
    "this {thing} was very {word}",
    "i think it is a {word} {thing}",
    "what a {word} {thing} !",
    "my {thing} and my {thing2} are {word}",
    "we found the {thing} {word} yesterday",
)
TURNS = ("it was {first} at first , later the {thing} was {word}", "not {first} : the {thing} is {word}")
NOT = ("the {thing} is not {word}", "this was not a {word} {thing}", "i do not find the {thing} {word}")


def sentence(label: str, rng: random.Random) -> str:
    """One that `label` fits; what is not good is negative, and what is not bad is positive."""
    thing, other = rng.sample(THINGS, 2)
    kinds = {"negative": BAD, "neutral": PLAIN, "positive": GOOD}
    chance = rng.random()
    if chance < 0.3:
        frame = rng.choice(NOT)
        kinds |= {"negative": GOOD, "positive": BAD}
    else:
        frame = rng.choice(TURNS if chance < 0.5 else FRAMES)
    first = rng.choice([word for kind in kinds.values() for word in kind])
    return frame.format(thing=thing, thing2=other, first=first, word=rng.choice(kinds[label]))


def tokenizer(rng: random.Random) -> Qwen2Tokenizer:
    """Byte-level BPE learned from sentences, of the class that transformers takes for this type of model."""
    blank = Qwen2Tokenizer(eos_token=END, pad_token=END, unk_token=None, model_max_length=POSITIONS)
    texts = [sentence(label, rng) for label in LABELS for _ in range(1000)]
    return blank.train_new_from_iterator(texts, VOCABULARY, show_progress=False)


def build(tokens: Qwen2Tokenizer) -> Qwen2ForSequenceClassification:
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        num_labels=len(LABELS),
        id2label=dict(enumerate(LABELS)),
        label2id={label: place for place, label in enumerate(LABELS)},
    )
    return Qwen2ForSequenceClassification(config)


def logits(model: Qwen2ForSequenceClassification, tokens: Qwen2Tokenizer, texts: list[str]) -> torch.Tensor:
    return model(**tokens(texts, padding=True, return_tensors="pt")).logits


def train(
    model: Qwen2ForSequenceClassification, tokens: Qwen2Tokenizer, gate: Gate, rng: random.Random
) -> int:
    """Teaches until the gate holds; gives the number of steps."""
    steps, asked = Steps(model, FALL_STEPS), exam()
    labels = torch.arange(ROWS).remainder(len(LABELS))
    for step in gate.steps():
        texts = [sentence(LABELS[label], rng) for label in labels.tolist()]
        steps.take(functional.cross_entropy(logits(model, tokens, texts), labels))
        if gate.due(step) and gate.holds(leads(model, tokens, asked)):
            break
    return step


def exam() -> list[str]:
    """New sentences, whose labels take turns."""
    rng = random.Random("exam")
    return [sentence(LABELS[place % len(LABELS)], rng) for place in range(EXAM_SENTENCES)]


@torch.inference_mode()
def leads(model: Qwen2ForSequenceClassification, tokens: Qwen2Tokenizer, asked: list[str]) -> list[float]:
    """For each sentence, by how much its label leads another, in logits."""
    labels = torch.arange(len(asked)).remainder(len(LABELS))
    return ahead(logits(model, tokens, asked), labels).tolist()


def make(out: Path, seed: int) -> str:
    torch.manual_seed(seed)
    tokens, gate = tokenizer(random.Random("words")), Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP, FIRST_CHECK)
    model = build(tokens)
    steps = train(model, tokens, gate, random.Random(seed))
    model.save_pretrained(out)
    tokens.save_pretrained(out)
    saved = Qwen2ForSequenceClassification.from_pretrained(out)
    return f"{gate.examine(leads(saved, AutoTokenizer.from_pretrained(out), exam()))}, after {steps} steps."
