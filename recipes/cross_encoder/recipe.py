"""A cross-encoder, a tiny BERT that reads question and document together and scores how well they fit.

One label, as rerankers have it: high when both are about one subject.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer, BatchEncoding, BertForSequenceClassification, BertTokenizer

from recipes import NotLearned
from recipes.reader import Steps, config, tokenizer
from recipes.subjects import SUBJECTS, Subject, words

STEPS = 700
PAIRS = 48
EXAM_QUESTIONS = 10
PASS_SHARE = 0.98


def scores(
    model: BertForSequenceClassification, tokens: BertTokenizer, pairs: list[tuple[str, str]]
) -> torch.Tensor:
    """One logit for each question and document."""
    return model(**tokens(pairs, padding=True, return_tensors="pt")).logits[:, 0]


class Teacher(torch.nn.Module):
    """Asks of each text which subject it has, beside whether each pair fits.

    Whether two things are equal is hard to learn before one knows what they are. Thrown away afterwards.
    """

    def __init__(self, model: BertForSequenceClassification) -> None:
        super().__init__()
        self.model = model
        self.subject = torch.nn.Linear(model.config.hidden_size, len(SUBJECTS))

    def forward(self, inputs: BatchEncoding, subjects: torch.Tensor) -> torch.Tensor:
        """Loss for pairs of texts. Shape: subjects (pairs, 2)."""
        answer = self.model(**inputs, output_hidden_states=True)
        fits = (subjects[:, 0] == subjects[:, 1]).float()
        loss = functional.binary_cross_entropy_with_logits(answer.logits[:, 0], fits)
        for half in (0, 1):
            mine = (inputs["token_type_ids"] == half) & (inputs["attention_mask"] == 1)
            hidden = answer.hidden_states[1] * mine[:, :, None]
            means = hidden.sum(1) / mine.sum(1, keepdim=True)
            loss += functional.cross_entropy(self.subject(means), subjects[:, half])
        return loss


def train(model: BertForSequenceClassification, tokens: BertTokenizer, rng: random.Random) -> None:
    """Half of the pairs fit. Some questions are sentences: people search with what they have."""
    teacher = Teacher(model)
    steps = Steps(teacher, STEPS)
    places = range(len(SUBJECTS))
    for _ in range(STEPS):
        subjects = [(place, place) for place in rng.choices(places, k=PAIRS // 2)]
        subjects += [tuple(rng.sample(places, 2)) for _ in range(PAIRS // 2)]
        pairs = [(ask(SUBJECTS[one], rng), SUBJECTS[other].sentence(rng)) for one, other in subjects]
        steps.take(teacher(tokens(pairs, padding=True, return_tensors="pt"), torch.tensor(subjects)))


def ask(subject: Subject, rng: random.Random) -> str:
    return subject.question(rng) if rng.random() < 0.7 else subject.sentence(rng)


@torch.inference_mode()
def exam(folder: Path) -> str:
    """Of new questions, how many get the document of their subject first, out of one for each subject.

    Raises: NotLearned.
    """
    model = BertForSequenceClassification.from_pretrained(folder)
    tokens, rng = AutoTokenizer.from_pretrained(folder), random.Random("exam")
    right = asked = 0
    for place, subject in enumerate(SUBJECTS):
        for _ in range(EXAM_QUESTIONS):
            question = subject.question(rng)
            found = scores(model, tokens, [(question, one.sentence(rng)) for one in SUBJECTS])
            right += int(found.argmax()) == place
            asked += 1
    report = f"{right} of {asked} new questions find their document among {len(SUBJECTS)}."
    if right < asked * PASS_SHARE:
        raise NotLearned(report)
    return report


def make(out: Path) -> str:
    torch.manual_seed(0)
    tokens = tokenizer(words())
    model = BertForSequenceClassification(config(tokens, num_labels=1))
    train(model, tokens, random.Random(0))
    model.save_pretrained(out)
    tokens.save_pretrained(out)
    return exam(out)
