"""Turns a caller's prompt into token ids, and into the text that an echo repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from penstock.engine import Prompt
from penstock.engines.sim import tokenizer, wire
from penstock.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as the model sees it. said: the text that an echo repeats."""

    token_ids: Sequence[int]
    said: str


def each(asked: Prompt) -> Sequence[Prompt]:
    """The prompts of a dict with `prompts`, or the one prompt that it is."""
    return asked["prompts"] if isinstance(asked, Mapping) and "prompts" in asked else [asked]


def read_prompt(prompt: Prompt) -> Tokens:
    """Text, token ids, or a dict with `prompt`, `prompt_token_ids` or `messages`. Raises: BadRequest."""
    if isinstance(prompt, str):
        return Tokens(tokenizer.encode(prompt), prompt)
    if not isinstance(prompt, Mapping):
        token_ids = wire.convert(prompt, list[int])
        return Tokens(token_ids, tokenizer.decode(token_ids))
    if "messages" in prompt:
        return chat(wire.convert(prompt, wire.Messages).messages)
    for key in ("prompt_token_ids", "prompt"):
        if isinstance(inner := prompt.get(key), str | list):
            return read_prompt(cast("str | list[int]", inner))
    raise BadRequest("A prompt must be text, token ids, or hold `prompt`, `prompt_token_ids` or `messages`.")


def chat(messages: Sequence[wire.ChatMessage]) -> Tokens:
    """The simulator's chat template: one line per message. An echo repeats the last message."""
    turns = "".join(f"{message.role}: {message.text()}\n" for message in messages)
    return Tokens(tokenizer.encode(turns + "assistant:"), messages[-1].text())
