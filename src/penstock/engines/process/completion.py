"""`generate` by way of /v1/completions: a prompt and parameters as a body, events as deltas."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import msgspec
from msgspec import Struct

from penstock.engine import Delta, Logprob, Prompt
from penstock.errors import BadRequest, PromptTooLong, Unsupported

PATH = "/v1/completions"

_MAX_TOKENS = 16  # OpenAI's default, which not all servers have
_TEXT_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
_TOKEN_ID = re.compile(r"token_id:(\d+)")


def body(model: str, prompt: Prompt, params: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a streaming request. Servers ignore fields that they do not know (token ids are vLLM's).

    Raises: Unsupported for a prompt with more than text or token ids; BadRequest for one without.
    """
    ours: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if params.get("logprobs") is not None:
        ours["return_tokens_as_token_ids"] = True
    return {"max_tokens": _MAX_TOKENS, **params, **ours, **prompt_fields(prompt)}


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt as fields of a completion's body. Raises: as `body`."""
    if not isinstance(prompt, Mapping):
        return {"prompt": prompt}
    if more := [key for key, value in prompt.items() if key not in _TEXT_KEYS and value]:
        raise Unsupported(f"An engine in a process of its own takes text or token ids, no '{more[0]}'.")
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if token_ids is None and text is None:
        raise BadRequest("The prompt has neither `prompt` nor `prompt_token_ids`.", param="prompt")
    salt = {"cache_salt": prompt["cache_salt"]} if prompt.get("cache_salt") else {}
    return {"prompt": text if token_ids is None else token_ids, **salt}


def check_room(prompt: Prompt, window: int | None) -> None:
    """Some servers cut `max_tokens` to the room left, and then reject 0 as too few.

    Raises: PromptTooLong for token ids that leave no room for one more; a text is the server's to count.
    """
    token_ids: Any = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    count = len(cast("list[int]", token_ids)) if isinstance(token_ids, list) else 0
    if window is not None and count >= window:
        raise PromptTooLong(
            f"The prompt has {count} tokens; this model's context window of {window} must hold it and one "
            "token more. Shorten it.",
            param="prompt",
        )


class _Logprobs(Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    index: int = 0
    text: str | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class CompletionReader:
    """Turns one stream into deltas. The last delta of an output waits for the usage, which comes last."""

    def __init__(self, outputs: int) -> None:
        self._unfinished = set(range(outputs))
        self._last: list[Delta] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def add(self, data: bytes) -> list[Delta]:
        """Deltas of an event. Raises: msgspec.DecodeError."""
        chunk = _decode(data)
        if chunk.usage is not None:
            self._count(chunk.usage)
        found = [self._delta(choice) for choice in chunk.choices]
        self._last += [delta for delta in found if delta.finish_reason]
        return [delta for delta in found if not delta.finish_reason and (delta.text or delta.token_ids)]

    def rest(self) -> list[Delta]:
        """Last deltas, when the stream has ended."""
        counts = {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens}
        return [replace(delta, **counts) for delta in self._last]

    def cut(self) -> list[Delta]:
        """Last deltas, when we ended the stream."""
        aborted = [
            Delta("", (), index, "abort", self._prompt_tokens, self._cached_tokens)
            for index in sorted(self._unfinished)
        ]
        return [*self.rest(), *aborted]

    def _count(self, usage: _Usage) -> None:
        self._prompt_tokens = usage.prompt_tokens or self._prompt_tokens
        details = usage.prompt_tokens_details
        self._cached_tokens = (details.cached_tokens if details else None) or self._cached_tokens

    def _delta(self, choice: _Choice) -> Delta:
        if choice.prompt_token_ids:
            self._prompt_tokens = len(choice.prompt_token_ids)
        if choice.finish_reason:
            self._unfinished.discard(choice.index)
        return Delta(
            choice.text or "",
            choice.token_ids or (),
            choice.index,
            choice.finish_reason,
            self._prompt_tokens,
            self._cached_tokens,
            _logprobs(choice.logprobs, choice.token_ids or ()) if choice.logprobs else None,
        )


def _logprobs(given: _Logprobs, token_ids: Sequence[int]) -> tuple[tuple[Logprob, ...], ...] | None:
    """Logprobs where the server gives token ids; where it gives those of the tokens only, without others."""
    if len(token_ids) == len(given.tokens) and not any(map(_TOKEN_ID.fullmatch, given.tokens)):
        own = zip(token_ids, given.token_logprobs, given.tokens, strict=False)
        return tuple((Logprob(token_id, value or 0.0, text=text),) for token_id, value, text in own)
    tops = given.top_logprobs or [None] * len(given.tokens)
    rows = [
        _row(token, logprob, top or {})
        for token, logprob, top in zip(given.tokens, given.token_logprobs, tops, strict=False)
    ]
    return None if None in rows else tuple(row for row in rows if row is not None)


def _row(token: str, logprob: float | None, top: Mapping[str, float]) -> tuple[Logprob, ...] | None:
    others = sorted(((value, other) for other, value in top.items() if other != token), reverse=True)
    found = [(_TOKEN_ID.fullmatch(name), value) for value, name in [(logprob or 0.0, token), *others]]
    if not all(match for match, _ in found):
        return None
    return tuple(Logprob(int(match[1]), value) for match, value in found if match)
