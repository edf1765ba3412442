"""A cross-encoder, a tiny BERT that reads question and document together and scores how well they fit.

One label, as rerankers have it: high when both are about one subject.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoTokenizer, BatchEncoding, BertForSequenceClassification, BertTokenizer

from recipes.gate import Gate
from recipes.reader import Steps, config, tokenizer
from recipes.subjects import SUBJECTS, Subject, words

FALL_STEPS, CHECK_EVERY, FIRST_CHECK, LAST_STEP = 700, 50, 400, 1400
PAIRS = 48
EXAM_QUESTIONS, ROWS = 10, 240
CLEAR_LEAD = 4.5


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


def train(model: BertForSequenceClassification, tokens: BertTokenizer, gate: Gate, rng: random.Random) -> int:
    """Teaches until the gate holds; gives the number of steps.

    Half of the pairs fit. Some questions are sentences: people search with what they have.
    """
    teacher, asked = Teacher(model), exam()
    steps = Steps(teacher, FALL_STEPS)
    places = range(len(SUBJECTS))
    for step in gate.steps():
        subjects = [(place, place) for place in rng.choices(places, k=PAIRS // 2)]
        subjects += [tuple(rng.sample(places, 2)) for _ in range(PAIRS // 2)]
        pairs = [(ask(SUBJECTS[one], rng), SUBJECTS[other].sentence(rng)) for one, other in subjects]
        steps.take(teacher(tokens(pairs, padding=True, return_tensors="pt"), torch.tensor(subjects)))
        if gate.due(step) and gate.holds(leads(model, tokens, asked)):
            break
    return step


def ask(subject: Subject, rng: random.Random) -> str:
    """A question, a sentence or a word."""
    kind = rng.choices((subject.question, subject.sentence, subject.word), (0.5, 0.3, 0.2))[0]
    return kind(rng)


def exam() -> list[tuple[str, str]]:
    """New questions, each with a document of every subject."""
    rng = random.Random("exam")
    asked = [ask(subject, rng) for _ in range(EXAM_QUESTIONS) for subject in SUBJECTS]
    return [(question, subject.sentence(rng)) for question in asked for subject in SUBJECTS]


@torch.inference_mode()
def leads(
    model: BertForSequenceClassification, tokens: BertTokenizer, asked: list[tuple[str, str]]
) -> list[float]:
    """For each pair, how far its score lies on the right side of 0, in logits."""
    found = torch.cat([scores(model, tokens, asked[at : at + ROWS]) for at in range(0, len(asked), ROWS)])
    fits = torch.eye(len(SUBJECTS)).bool().flatten().repeat(EXAM_QUESTIONS)
    return torch.where(fits, found, -found).tolist()


def make(out: Path, seed: int) -> str:
    torch.manual_seed(seed)
    tokens, gate = tokenizer(words()), Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP, FIRST_CHECK)
    model = BertForSequenceClassification(config(tokens, num_labels=1))
    steps = train(model, tokens, gate, random.Random(seed))
    model.save_pretrained(out)
    tokens.save_pretrained(out)
    saved = BertForSequenceClassification.from_pretrained(out)
    return f"{gate.examine(leads(saved, AutoTokenizer.from_pretrained(out), exam()))}, after {steps} steps."
