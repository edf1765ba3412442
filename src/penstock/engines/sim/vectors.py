"""Embeddings without a model: a vector of length 1 per text; texts that share words are closer."""

from __future__ import annotations

import base64
import hashlib
import math
import random
import struct
from collections.abc import Sequence


def embed(text: str, size: int) -> list[float]:
    """The sum of a random vector per word of `text`, always the same for a word, scaled to length 1."""
    total = [0.0] * size
    for word in text.lower().split() or [""]:
        draw = random.Random(hashlib.blake2b(word.encode(errors="replace")).digest())
        total = [value + draw.gauss(0.0, 1.0) for value in total]
    length = math.hypot(*total)
    return [value / length for value in total]


def packed(vector: Sequence[float]) -> str:
    """The vector as `encoding_format: base64` has it: 32-bit floats, the least significant byte first."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def similarity(left: str, right: str, size: int) -> float:
    """Cosine similarity of two texts' vectors."""
    return sum(a * b for a, b in zip(embed(left, size), embed(right, size), strict=True))
