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

from recipes import NotLearned
from recipes.reader import POSITIONS, Steps, config, tokenizer
from recipes.subjects import SUBJECTS, words

STEPS = 250
PAIRS_PER_SUBJECT = 2
SHARPNESS = 10.0
EXAM_SENTENCES = 20
PASS_SHARE = 0.98


def embed(model: BertModel, tokens: BertTokenizer, texts: list[str]) -> torch.Tensor:
    """Rows of length 1."""
    inputs = tokens(texts, padding=True, return_tensors="pt")
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def train(model: BertModel, tokens: BertTokenizer, rng: random.Random) -> None:
    steps = Steps(model, STEPS)
    labels = torch.arange(len(SUBJECTS)).repeat_interleave(PAIRS_PER_SUBJECT)
    same = (labels[:, None] == labels[None, :]).float()
    targets = same / same.sum(1, keepdim=True)
    for _ in range(STEPS):
        left, right = (
            [subject.sentence(rng) for subject in SUBJECTS for _ in range(PAIRS_PER_SUBJECT)]
            for _ in range(2)
        )
        near = embed(model, tokens, left) @ embed(model, tokens, right).T * SHARPNESS
        steps.take(functional.cross_entropy(near, targets))


@torch.inference_mode()
def exam(folder: Path) -> str:
    """Of new sentences, how many have a sentence of their own subject as their nearest neighbour.

    Raises: NotLearned.
    """
    model, tokens = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random("exam")
    texts = [subject.sentence(rng) for subject in SUBJECTS for _ in range(EXAM_SENTENCES)]
    subjects = torch.arange(len(SUBJECTS)).repeat_interleave(EXAM_SENTENCES)
    vectors = embed(model, tokens, texts)
    near = (vectors @ vectors.T).fill_diagonal_(-1.0)
    right = (subjects[near.argmax(1)] == subjects).float().mean().item()
    report = f"{right:.1%} of {len(texts)} new sentences lie nearest to one of their subject."
    if right < PASS_SHARE:
        raise NotLearned(report)
    return report


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


def make(out: Path) -> str:
    torch.manual_seed(0)
    tokens = tokenizer(words())
    model = BertModel(config(tokens), add_pooling_layer=False)
    train(model, tokens, random.Random(0))
    save(model, tokens, out)
    return exam(out)
