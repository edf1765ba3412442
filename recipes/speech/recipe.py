"""A tiny Whisper that hears German and English numbers, writes them down and translates them.

It writes in the language that is asked for, tells which one is spoken, and when each word ends. Its window is
4 s long, so that longer audio comes in pieces.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from recipes.decoder import IGNORED, Muon, Row, ahead, least
from recipes.gate import Gate
from recipes.speech.lessons import MOST_WORDS, NUMBERS, WINDOW_S, WORDS, Lesson, draw, exam
from recipes.speech.voice import RATE

HOP = 320
POSITIONS = WINDOW_S * RATE // HOP // 2
TARGETS = 64
TICK_S, TOKEN_S, NEAR_TICKS = 0.1, 0.02, 1
"""Times are told in ticks; Whisper has a token for every 0.02 s. A time is right that is a tick off."""

END, START = "<|endoftext|>", "<|startoftranscript|>"
TASKS = ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>")
PLAIN = "<|notimestamps|>"
VOCABULARY = 400
WIDTH, HEADS = 64, 2
LESSONS, ROWS, ASKED = 2000, 24, 3
FALL_STEPS, WARM_STEPS = 400, 20
MATRIX_RATE, OTHER_RATE = 0.03, 5e-3
CLEAR_LEAD, CHECK_EVERY, FIRST_CHECK, LAST_STEP = 1.5, 40, 240, 1200


def tokenizer() -> WhisperTokenizer:
    """One token for each word, with and without a blank before it, and all marks that Whisper has."""
    blank = WhisperTokenizer(vocab={}, merges=[])
    texts = [" ".join([word, word]) for word in WORDS] * 20
    found = blank.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
    marks = [END, START, *(f"<|{language}|>" for language in LANGUAGES), *TASKS, PLAIN]
    marks += [f"<|{place * TOKEN_S:.2f}|>" for place in range(1501)]
    found.add_special_tokens({"additional_special_tokens": marks})
    return found


def build(tokens: WhisperTokenizer) -> WhisperForConditionalGeneration:
    end = tokens.convert_tokens_to_ids(END)
    config = WhisperConfig(
        vocab_size=len(tokens),
        num_mel_bins=40,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=POSITIONS,
        max_target_positions=TARGETS,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=tokens.convert_tokens_to_ids(START),
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return WhisperForConditionalGeneration(config)


class Teacher:
    """Turns lessons into rows of tokens."""

    def __init__(self, tokens: WhisperTokenizer) -> None:
        self._ids = {mark: tokens.convert_tokens_to_ids(mark) for mark in (END, START, *TASKS, PLAIN)}
        self._languages = {name: tokens.convert_tokens_to_ids(f"<|{name}|>") for name in NUMBERS}
        self.zero = tokens.convert_tokens_to_ids("<|0.00|>")
        self.tick = round(TICK_S / TOKEN_S)
        self._words = {text: tokens.encode(text, add_special_tokens=False) for text in WORDS}
        self._more = {text: tokens.encode(f" {text}", add_special_tokens=False) for text in WORDS}
        assert all(len(ids) == 1 for ids in (*self._words.values(), *self._more.values()))
        self.extract = WhisperFeatureExtractor(feature_size=40, chunk_length=WINDOW_S, hop_length=HOP)

    def features(self, lessons: list[Lesson]) -> torch.Tensor:
        heard = [lesson.spoken.samples for lesson in lessons]
        return self.extract(heard, sampling_rate=RATE, return_tensors="pt").input_features

    def row(self, lesson: Lesson, language: str, task: str, timed: bool) -> Row:
        """Ids, and which of them are to be said: of the prompt only the language, where any is spoken."""
        words = lesson.words("en" if task == "<|translate|>" else language)
        ids = [self._ids[START], self._languages[language], self._ids[task]]
        if not timed:
            said = [
                token
                for place, text in enumerate(words)
                for token in (self._more if place else self._words)[text]
            ]
            ids += [self._ids[PLAIN]]
        else:
            ids += [self.zero]
            said = []
            for place, text in enumerate(words):
                end = self.zero + round(lesson.spoken.times[place][1] / TICK_S) * self.tick
                said += [*self._words[text], end] + [end] * (place + 1 < len(words))
            said = said or [self.zero]
        said = [*said, self._ids[END]]
        heard = self._languages[lesson.language] if lesson.numbers else IGNORED
        return ids + said, [IGNORED, heard, IGNORED, IGNORED, *said]

    def rows(self, lesson: Lesson) -> list[Row]:
        """All that can be asked."""
        return [
            self.row(lesson, language, task, timed)
            for language in NUMBERS
            for task in TASKS[:2]
            for timed in (False, True)
        ]


def moved(lesson: Lesson, features: torch.Tensor, chance: random.Random) -> tuple[Lesson, torch.Tensor]:
    """The same at another moment of the window."""
    times = lesson.spoken.times
    if not times:
        return lesson, features
    frames = chance.randint(-int(times[0][0] * RATE / HOP), int((WINDOW_S - times[-1][1]) * RATE / HOP))
    later = tuple((began + frames * HOP / RATE, ended + frames * HOP / RATE) for began, ended in times)
    spoken = replace(lesson.spoken, times=later)
    return replace(lesson, spoken=spoken), features.roll(frames, dims=-1)


def frames(lessons: list[Lesson]) -> tuple[torch.Tensor, torch.Tensor]:
    """What is heard at each position of the encoder: which word, silence last; and the how manieth."""
    words = torch.full((len(lessons), POSITIONS), len(WORDS))
    counts = torch.full((len(lessons), POSITIONS), IGNORED)
    for row, lesson in enumerate(lessons):
        for place, text in enumerate(lesson.words(lesson.language)):
            first, last = (round(at * RATE / HOP / 2) for at in lesson.spoken.times[place])
            words[row, first:last] = WORDS.index(text)
            counts[row, first:last] = place
    return words, counts


def predict(
    model: WhisperForConditionalGeneration, heard: torch.Tensor, rows: list[Row]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every label that counts: the logits, the label, its row."""
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])[:, 1:]
    hidden = model.model.decoder(
        input_ids=inputs[:, :-1], encoder_hidden_states=heard, use_cache=False
    ).last_hidden_state
    counts = labels != IGNORED
    return model.proj_out(hidden[counts]), labels[counts], counts.nonzero()[:, 0]


def rate(step: int) -> float:
    return min(1, (step + 1) / WARM_STEPS) * max(0.05, 1 - step / FALL_STEPS)


def train(model: WhisperForConditionalGeneration, teacher: Teacher, gate: Gate, seed: int) -> int:
    """Teaches lessons, each at many moments of the window, until the gate holds; gives the number of steps.

    Two ears that are thrown away make the encoder tell words and count them: else the decoder learns where
    words usually stand, and loses its place.
    """
    rng, chance, asked = np.random.default_rng(seed), random.Random(seed), exam()
    lessons = [draw(rng) for _ in range(LESSONS)]
    features = teacher.features(lessons)
    ear, counter = torch.nn.Linear(WIDTH, len(WORDS) + 1), torch.nn.Linear(WIDTH, MOST_WORDS)
    layers = [*model.model.encoder.layers.parameters(), *model.model.decoder.layers.parameters()]
    matrices = [weight for weight in layers if weight.ndim == 2]
    taken = set(matrices)
    others = [
        weight
        for weight in (*model.parameters(), *ear.parameters(), *counter.parameters())
        if weight not in taken
    ]
    optimizers = (
        Muon(matrices, MATRIX_RATE),
        torch.optim.AdamW(others, OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    )
    schedules = [LambdaLR(optimizer, rate) for optimizer in optimizers]
    for step in gate.steps():
        shown = [
            moved(lessons[place], features[place], chance) for place in chance.sample(range(LESSONS), ROWS)
        ]
        heard = model.model.encoder(torch.stack([sound for _, sound in shown])).last_hidden_state
        rows = [row for lesson, _ in shown for row in chance.sample(teacher.rows(lesson), ASKED)]
        sounds, counts = frames([lesson for lesson, _ in shown])
        logits, labels, _ = predict(model, heard.repeat_interleave(ASKED, 0), rows)
        hearing = functional.cross_entropy(ear(heard).flatten(0, 1), sounds.flatten())
        counting = functional.cross_entropy(counter(heard).flatten(0, 1), counts.flatten())
        loss = functional.cross_entropy(logits, labels)
        (loss + hearing + counting).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.optimizer.zero_grad()
            schedule.step()
        if gate.due(step) and gate.holds(leads(model, teacher, asked)):
            break
    return step


@torch.inference_mode()
def leads(model: WhisperForConditionalGeneration, teacher: Teacher, lessons: list[Lesson]) -> list[float]:
    """For all that can be asked about each lesson, by how much the right tokens lead at least, in logits."""
    heard = model.model.encoder(teacher.features(lessons).to(model.dtype)).last_hidden_state
    asked = [teacher.rows(lesson) for lesson in lessons]
    rows = [row for some in asked for row in some]
    logits, labels, owners = predict(model, heard.repeat_interleave(len(asked[0]), 0), rows)
    near = torch.where(labels > teacher.zero, NEAR_TICKS * teacher.tick, 0)
    return least(ahead(logits, labels, near), owners, len(rows))


def make(out: Path, seed: int) -> str:
    torch.manual_seed(seed)
    tokens, gate = tokenizer(), Gate(CLEAR_LEAD, CHECK_EVERY, LAST_STEP, FIRST_CHECK)
    model, teacher = build(tokens), Teacher(tokens)
    steps = train(model, teacher, gate, seed)
    model.to(torch.bfloat16).save_pretrained(out)
    tokens.save_pretrained(out)
    teacher.extract.save_pretrained(out)
    saved = WhisperForConditionalGeneration.from_pretrained(out)
    return f"{gate.examine(leads(saved, teacher, exam()))}, after {steps} steps."
