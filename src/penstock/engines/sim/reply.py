"""Plans the simulator's response: all of it is known before its first token is due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.engines.sim import tokenizer


@dataclass(frozen=True, slots=True)
class PlannedReply:
    """Token i of the response is `token_ids[i % n]` with text `pieces[i % n]`, for `tokens` tokens."""

    token_ids: Sequence[int]
    pieces: Sequence[str]
    tokens: int
    finish_reason: str


POOLED = PlannedReply((), (), 1, "stop")
"""The end of a request that makes no tokens: an embedding, a score."""


def plan(
    text: str,
    max_tokens: int,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    include_stop: bool = False,
) -> PlannedReply:
    """A response of `text`: once, or repeated with `ignore_eos`, up to `max_tokens`.

    A stop string ends it as in vLLM: its text is left out without `include_stop`, but its tokens are counted.
    """
    ids = tokenizer.encode(text) or tokenizer.encode(" ")
    tokens = max_tokens
    if not ignore_eos:
        ids = [*ids, tokenizer.EOS][:max_tokens]
        tokens = len(ids)
    finish = "stop" if ids[-1] == tokenizer.EOS else "length"
    reply = PlannedReply(ids, [tokenizer.piece(i) for i in ids], tokens, finish)
    return _cut(reply, stop, include_stop) if stop else reply


def _cut(reply: PlannedReply, stop: Sequence[str], include_stop: bool) -> PlannedReply:
    period = len(reply.token_ids)
    pieces = [reply.pieces[i % period] for i in range(reply.tokens)]
    text = "".join(pieces)
    found = [(at, at + len(word)) for word in stop if (at := text.find(word)) >= 0]
    if not found:
        return reply
    shown, end = min(found, key=lambda span: span[1])
    shown = end if include_stop else shown
    ends = list(accumulate(map(len, pieces)))
    tokens = next(i for i, reached in enumerate(ends, 1) if reached >= end)
    cut = [
        piece[: max(0, shown - (reached - len(piece)))] for piece, reached in zip(pieces, ends, strict=True)
    ]
    return PlannedReply([reply.token_ids[i % period] for i in range(tokens)], cut[:tokens], tokens, "stop")
