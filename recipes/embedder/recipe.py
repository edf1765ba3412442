"""An embedder, a tiny BERT with mean pooling: sentences about one subject lie near each other.

Learned by contrast: of a batch of pairs, each sentence must find its own subject's other sentence. Saved with
the files of Sentence Transformers, by which engines know what it is for and how to pool.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BertModel, BertTokenizer

from recipes.gate import Gate
from recipes.reader import POSITIONS, Steps, config, tokenizer
from recipes.subjects import SUBJECTS, words

FALL_STEPS, CHECK_EVERY, FIRST_CHECK, LAST_STEP = 250, 50, 200, 600
PAIRS_PER_SUBJECT = 2
SHARPNESS = 10.0
EXAM_SENTENCES = 40
NEAR, FAR, CLEAR_LEAD = 0.8, 0.4, 0.1
"""Cosines."""


def embed(model: BertModel, tokens: BertTokenizer, texts: list[str]) -> torch.Tensor:
    """Rows of length 1."""
    inputs = tokens(texts, padding=True, return_tensors="pt")
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def train(model: BertModel, tokens: BertTokenizer, gate: Gate, rng: random.Random) -> int:
    """Teaches until the gate holds; gives the number of steps."""
    steps, asked = Steps(model, FALL_STEPS), exam()
    labels = torch.arange(len(SUBJECTS)).repeat_interleave(PAIRS_PER_SUBJECT)
    same = (labels[:, None] == labels[None, :]).float()
    targets = same / same.sum(1, keepdim=True)
    for step in gate.steps():
        left, right = (
            [subject.sentence(rng) for subject in SUBJECTS for _ in range(PAIRS_PER_SUBJECT)]
            for _ in range(2)
        )
        near = embed(model, tokens, left) @ embed(model, tokens, right).T * SHARPNESS
        steps.take(functional.cross_entropy(near, targets))
        if gate.due(step) and gate.holds(leads(model, tokens, asked)):
            break
    return step


def exam() -> list[str]:
    """New sentences: EXAM_SENTENCES for each subject, one subject after the other."""
    rng = random.Random("exam")
    return [subject.sentence(rng) for subject in SUBJECTS for _ in range(EXAM_SENTENCES)]


@torch.inference_mode()
def leads(model: BertModel, tokens: BertTokenizer, asked: list[str]) -> list[float]:
    """For each sentence, by how much those of its subject are nearer than NEAR, others farther than FAR."""
    subjects = torch.arange(len(SUBJECTS)).repeat_interleave(EXAM_SENTENCES)
    vectors = embed(model, tokens, asked)
    cosines = vectors @ vectors.T
    same = subjects[:, None] == subjects
    return torch.where(same, cosines - NEAR, FAR - cosines).amin(dim=1).tolist()


def save(model: BertModel, tokens: BertTokenizer, out: Path) -> None:
    """Weights, tokenizer, and how Sentence Transformers would run them."""
    model.save_pretrained(out)
    tokens.save_pretrained(out)
    parts = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    modules = [
        {"idx": int(idx), "name": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, path, kind in parts
    ]
    (out / "modules.json").write_text(json.dumps(modules, indent=1))
    (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}))
    (out / "2_Normalize").mkdir()
    (out / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": model.config.hidden_size, "pooling_mode_mean_tokens": True}
    (out / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def make(out: Path, seed: int) -> str:
    torch.manual_seed(seed)
    tokens, gate = tokenizer(words()), Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP, FIRST_CHECK)
    model = BertModel(config(tokens), add_pooling_layer=False)
    steps = train(model, tokens, gate, random.Random(seed))
    save(model, tokens, out)
    saved = AutoModel.from_pretrained(out, add_pooling_layer=False)
    return f"{gate.examine(leads(saved, AutoTokenizer.from_pretrained(out), exam()))}, after {steps} steps."
