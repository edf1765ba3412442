"""Hashes of a prompt's prefixes: at most 56 for any length, and 25 us for the longest prompt.

Blocks grow with their distance from the start, eight for each doubling, so that two prompts which share a
beginning are known to share at least 8/9 of it, or all but 255 bytes. What they hash is the JSON as the
client sent it: two requests of a conversation begin with the same bytes, since the same client wrote them.
"""

from __future__ import annotations

import zlib

_FIRST = 256
HASHED_BYTES = 128 * 2**10
"""Of a prompt, from its start: prompts that share so much go to the same replica anyway."""


def _ends() -> tuple[int, ...]:
    ends = [_FIRST]
    while ends[-1] < HASHED_BYTES:
        doubling = 1 << (ends[-1].bit_length() - 1)
        ends.append(ends[-1] + max(_FIRST, doubling // 8))
    return tuple(ends)


ENDS = _ends()
"""Where blocks end. Units: bytes."""


_ANSWER = b'"assistant"'  # the role of a message, in all chat APIs


def blocks(prompt: bytes, seed: str = "") -> tuple[int, ...]:
    """A hash for every whole block, including everything before it and `seed`.

    Valid in this process only: Python's hash of bytes is fast and salted, so clients cannot construct
    collisions.
    """
    hashes: list[int] = []
    chain, start, size = hash(seed), 0, len(prompt)
    for end in ENDS:
        if end > size:
            break
        chain = hash((chain, prompt[start:end]))
        hashes.append(chain)
        start = end
    return tuple(hashes)


def home(prompt: bytes, seed: str = "") -> int:
    """A hash of a prefix of the opening, the same in every process; 0 without a whole block.

    The opening ends where the first answer begins, so that it is the same in all requests of a conversation.
    Hashes its first half to quarter (largest power of two), so prompts that share this prefix have the same
    home.
    """
    if len(prompt) < _FIRST:
        return 0
    answer = prompt.find(_ANSWER, 0, HASHED_BYTES)
    first_turn = answer if answer >= 0 else min(len(prompt), HASHED_BYTES)
    half = 1 << max(0, (first_turn // 2).bit_length() - 1)
    found = zlib.crc32(prompt[: max(half, _FIRST)], zlib.crc32(seed.encode()))
    return found * 0x9E3779B97F4A7C15 % 2**64  # its 32 bits over the 64 of a ring
