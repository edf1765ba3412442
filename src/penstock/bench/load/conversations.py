"""What is asked: conversations of one or more turns, as bodies of OpenAI requests.

A conversation is a generator: it gives a request, is sent the answer's text, and gives the next one. Each is
a function of its number, so that workers need not talk to each other. Lengths follow `seed` and are the same
in every run; texts follow `salt` and are new in every run, or caches of an earlier one would help.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec

from penstock.bench.load.lengths import Length
from penstock.bench.load.text import WORDS, TextSource, TokenScale
from penstock.bench.load.trace import HASH_BLOCK_TOKENS, Arrival


@dataclass(frozen=True, slots=True)
class Request:
    """A body, and the tokens that its answer is to have; 0 when the service is left to decide."""

    body: bytes
    asked_tokens: int


Conversation = Generator[Request, str, None]


@dataclass(frozen=True, slots=True)
class RequestFormat:
    """How requests are worded for one service. limit: its name for the most tokens of an answer."""

    model: str
    chat: bool = True
    usage: bool = True
    ignore_eos: bool = True
    limit: str = "max_tokens"
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def asked(self, text: str) -> dict[str, Any]:
        """What a request with this text alone asks."""
        return {"messages": [_user(text)]} if self.chat else {"prompt": text}

    def request(self, asked: Mapping[str, Any], tokens: int) -> Request:
        """asked: `messages` or `prompt`, and whatever else a user's own body holds."""
        body: dict[str, Any] = {**asked, "model": self.model, "stream": True}
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if tokens:
            body[self.limit] = tokens
        if self.ignore_eos:
            body["ignore_eos"] = True
        return Request(msgspec.json.encode({**body, **self.more}), tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """What workers need to write the same requests. Of `bodies`, `trace` and lengths, the first counts."""

    form: RequestFormat
    salt: str
    input: Length
    output: Length | None
    turns: int = 1
    shared_prefix: int = 0
    prefixes: int = 1
    seed: int = 0
    words: tuple[str, ...] = WORDS
    scale: TokenScale = field(default_factory=TokenScale)
    bodies: tuple[bytes, ...] = ()
    trace: tuple[Arrival, ...] = ()


class RequestWriter:
    """Writes the conversations of a work. Making one takes 50 ms: its text is made anew."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._form = work.form
        self._text = TextSource(work.salt, work.words)

    def conversation(self, index: int, level: int = 0) -> Conversation:
        """Number `index` of a level: lengths are the same in every level, texts are not."""
        if self._work.bodies:
            return self._own(index)
        name = f"{level}/{index}"
        if self._work.trace:
            return self._traced(self._work.trace[index], name)
        random = Random(f"{index} {self._work.seed}")
        return self._written(random, self._prefix(random, level), name)

    def _own(self, index: int) -> Conversation:
        """The user's own body; his limit on tokens stays unless lengths were asked for."""
        body = msgspec.json.decode(self._work.bodies[index % len(self._work.bodies)], type=dict[str, Any])
        output = self._work.output
        yield self._form.request(body, output.draw(Random(f"{index} {self._work.seed}")) if output else 0)

    def _traced(self, arrival: Arrival, name: str) -> Conversation:
        scale = self._work.scale
        if arrival.blocks:
            words = scale.words(HASH_BLOCK_TOKENS)
            text = "".join(self._text.cut(words, f"block {block}") for block in arrival.blocks)
            text = text[: 4 * scale.words(arrival.input_tokens - scale.overhead)]
        else:
            text = self._text.cut(scale.words(arrival.input_tokens - scale.overhead), name)
        yield self._form.request(self._form.asked(text), arrival.output_tokens)

    def _written(self, random: Random, prefix: str, name: str) -> Conversation:
        messages, prompt = [{"role": "system", "content": prefix}] if prefix else [], prefix
        overhead = 0.0 if prefix else self._work.scale.overhead
        for turn in range(self._work.turns):
            tokens = self._work.input.draw(random)
            text = self._text.cut(self._work.scale.words(tokens - overhead), f"{name}/{turn}")
            messages, prompt = [*messages, _user(text)], prompt + text
            asked = {"messages": messages} if self._form.chat else {"prompt": prompt}
            answer = yield self._form.request(
                asked, self._work.output.draw(random) if self._work.output else 0
            )
            messages, prompt = [*messages, {"role": "assistant", "content": answer}], prompt + answer
            overhead = 0.0

    def _prefix(self, random: Random, level: int) -> str:
        """One of those that conversations of a level share, or nothing; it bears the template's overhead."""
        scale, tokens = self._work.scale, self._work.shared_prefix
        if not tokens:
            return ""
        which = random.randrange(self._work.prefixes)
        return self._text.cut(scale.words(tokens - scale.overhead), f"prefix {level}/{which}")


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
