"""Training conversations, drawn at random from questions.yaml. It knows nothing of tokens or models.

A draw varies what a user varies - case, marks at the end, small slips, a system prompt, earlier turns - and
keeps the answer. `checks` lists the forms that a trained model must answer word for word.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

Message = dict[str, str]
Conversation = list[Message]

FRAMES = (
    "What is {}?",
    "What's {}?",
    "What does {} mean?",
    "Explain {}.",
    "Tell me about {}.",
    "Can you explain {}?",
    "What exactly is {}?",
    "Define {}.",
)


@dataclass(frozen=True, slots=True)
class Topic:
    """One answer and every way in which `questions.yaml` asks for it, the way that the tests use first."""

    asks: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """`questions.yaml`, read. `unknown.asks` are all answered by `unknown.answer`."""

    known: tuple[Topic, ...]
    unknown: Topic
    systems: tuple[str, ...]

    def texts(self) -> Iterator[str]:
        """Every text once: what the tokenizer learns its merges from."""
        for topic in (*self.known, self.unknown):
            yield topic.answer
            yield from topic.asks
        for topic in self.known:
            yield from (ask.lower() for ask in topic.asks)
        yield from self.systems


def read(path: Path) -> Knowledge:
    """The knowledge in `path`, with "What is X?" spread over all FRAMES."""
    data = yaml.safe_load(path.read_text())
    known = tuple(Topic(_framed(entry["ask"].splitlines()), entry["answer"]) for entry in data["known"])
    unknown = data["unknown"]
    asks = [*unknown["ask"].splitlines(), *(f"What is {term}?" for term in unknown["terms"].split(", "))]
    return Knowledge(known, Topic(_framed(asks), unknown["answer"]), tuple(data["systems"]))


def _framed(asks: list[str]) -> tuple[str, ...]:
    framed = list(asks)
    for ask in asks:
        if ask.startswith("What is ") and ask.endswith("?"):
            framed += [frame.format(ask[len("What is ") : -1]) for frame in FRAMES]
    return tuple(dict.fromkeys(framed))


def conversation(knowledge: Knowledge, turns: int, rng: random.Random) -> list[Message]:
    """`turns` questions with their answers, after a system prompt in half of the draws."""
    messages = [_message("system", rng.choice(knowledge.systems))] if rng.random() < 0.5 else []
    for _ in range(turns):
        topic = knowledge.unknown if rng.random() < 0.2 else rng.choice(knowledge.known)
        ask = rng.choice(topic.asks[:100] if rng.random() < 0.3 else topic.asks)
        messages += [_message("user", _spelling(ask, rng)), _message("assistant", topic.answer)]
    return messages


def passage(knowledge: Knowledge, rng: random.Random) -> str:
    """An answer as plain text, in half of the draws after its question: what /v1/completions continues."""
    topic = rng.choice(knowledge.known)
    return topic.answer if rng.random() < 0.5 else f"{rng.choice(topic.asks)} {topic.answer}"


def _spelling(ask: str, rng: random.Random) -> str:
    """`ask` as somebody might type it."""
    if rng.random() < 0.4:
        return ask
    bare = ask.rstrip("?!.") or ask
    text = rng.choice((ask, bare, bare, bare + "?", bare + "!", bare + "."))
    text = rng.choices((text, text.lower(), text.upper()), (4, 5, 1))[0]
    if rng.random() < 0.06 and len(text) > 8:
        slip = rng.randrange(1, len(text) - 1)
        text = text[:slip] + text[slip + 1 :]
    return text


def checks(knowledge: Knowledge) -> Iterator[tuple[Conversation, str]]:
    """Conversations that end in a question, each with the answer that must follow."""
    earlier: Conversation = []
    for topic in knowledge.known:
        ask = topic.asks[0]
        for spelling in (*topic.asks, ask.lower(), ask.rstrip("?!."), ask.lower().rstrip("?!.")):
            yield [_message("user", spelling)], topic.answer
        question = _message("user", ask)
        yield from (([_message("system", system), question], topic.answer) for system in knowledge.systems)
        yield [*earlier[-2:], question], topic.answer
        yield [*earlier[-10:], question], topic.answer
        earlier += [question, _message("assistant", topic.answer)]
    for ask in knowledge.unknown.asks[:100]:
        yield [_message("user", ask)], knowledge.unknown.answer


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
