"""The simulator's tokenizer: pieces of up to four bytes, which are their own ids. Lossless, no vocabulary."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.errors import BadRequest

EOS = 0
"""Ends a response; has no text."""

_PIECE = re.compile(r"[\x00-\x7f][\x21-\x7e]{0,3}|[^\x00-\x7f]")
"""One ASCII character and up to three more of its word, or one other character: four bytes at most."""

MOST_CHARS = 1 << 21
"""Of one text: a longer one would delay other requests noticeably."""


def encode(text: str) -> list[int]:
    """Token ids of `text`: each piece's bytes after a leading 1, as a number below 2**33.

    Raises: BadRequest when it is too long.
    """
    if len(text) > MOST_CHARS:
        raise BadRequest(
            f"The text has {len(text):,} characters; the simulator takes {MOST_CHARS:,} at most."
        )
    return [int.from_bytes(b"\1" + piece.encode(errors="replace")) for piece in _PIECE.findall(text)]


def piece(token_id: int) -> str:
    """Text of one token.

    Raises: BadRequest for a number that `encode` never returns.
    """
    if token_id == EOS:
        return ""
    try:
        marked = token_id.to_bytes(5).lstrip(b"\0")
        if marked[:1] != b"\1" or len(marked) == 1:
            raise ValueError(token_id)
        return marked[1:].decode()
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"Token id {token_id} is not in the vocabulary.", token_id=token_id) from error


def decode(token_ids: Sequence[int]) -> str:
    """Text of many tokens. Raises: BadRequest."""
    return "".join(map(piece, token_ids))
