"""When two requests may share one answer: the key of a request, and which row has the answer of a key."""

from __future__ import annotations

import base64
import hashlib
from array import array
from bisect import bisect_left, bisect_right

import msgspec

from penstock.data.rows.request import RowRequest

_ROW_BITS = 40
_FIRST_SLOTS = 1 << 10


def request_digest(request: RowRequest, salt: bytes) -> str:
    """Equal for equal requests. salt: identity of the model, and whatever else keeps answers apart."""
    found = hashlib.blake2b(salt, digest_size=12)
    prompt = () if request.prompt is None else (request.prompt,)
    for part in (request.path.encode(), (request.model or "").encode(), request.body, *prompt):
        found.update(len(part).to_bytes(8, "big") + part)
    return base64.b64encode(found.digest()).decode()


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    seed: int | None = None


_sampling = msgspec.json.Decoder(_Sampling).decode
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def is_deterministic(request: RowRequest) -> bool:
    """Whether the same request gets the same answer: nothing is sampled, or with a seed in the request.

    A payload for a URL, and a method's call, have no path of an endpoint: they may generate, too.
    """
    if request.path.startswith("/") and request.path not in _GENERATING:
        return True
    try:
        body = _sampling(request.body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return body.temperature == 0 or body.seed is not None


class SortedKeys:
    """Numbers below 2**64 by key, for keys that are all known before the first look-up. 16 bytes each.

    Call `add` for each, then `sort`. numbers: by slot. Two keys of ten million have the same hash with a
    probability of 3e-6: the caller compares the keys themselves.
    """

    def __init__(self) -> None:
        self._hashes, self.numbers = array("q"), array("Q")

    def add(self, key: str, number: int) -> None:
        self._hashes.append(hash(key))
        self.numbers.append(number)

    def sort(self) -> None:
        import numpy as np

        order = np.argsort(np.frombuffer(self._hashes, "q"), kind="stable")
        for words in (self._hashes, self.numbers):
            sorting = np.frombuffer(words, words.typecode)
            sorting[:] = sorting[order]

    def slots(self, key: str) -> range:
        """Those of all numbers with the key's hash, in the order in which they were added."""
        first = bisect_left(self._hashes, hash(key))
        return range(first, bisect_right(self._hashes, hash(key), first))


class RowsByKey:
    """The first row of each key. 24 to 48 bytes per key, where a dict takes some 200.

    A hash table with linear probing in one array. Each slot has two words: the first 64 bits of the key's
    digest, then 24 further bits and the row, plus one so that an empty slot is 0. Two keys of a hundred
    million have the same 88 bits with a probability of 2e-11.
    """

    def __init__(self) -> None:
        self._used = 0
        self._slots = array("Q", bytes(16 * _FIRST_SLOTS))

    def __len__(self) -> int:
        return self._used

    def get(self, key: str) -> int | None:
        """The row of `key`."""
        _, found = self._find(*_digest(key))
        return (found & (1 << _ROW_BITS) - 1) - 1 if found else None

    def setdefault(self, key: str, row: int) -> None:
        """Stores `row`, below 2**40 - 1, unless the key has one."""
        first, second = _digest(key)
        slot, found = self._find(first, second)
        if not found:
            self._slots[slot], self._slots[slot + 1] = first, second | row + 1
            self._used += 1
            if 3 * self._used > len(self._slots):  # two thirds of the slots
                self._grow()

    def _find(self, first: int, second: int) -> tuple[int, int]:
        """Position and second word of the key's slot; that word is 0 where the key has none."""
        slots = self._slots
        mask = len(slots) - 1
        at = 2 * first & mask
        while (found := slots[at + 1]) and (slots[at] != first or found ^ second >= 1 << _ROW_BITS):
            at = at + 2 & mask
        return at, found

    def _grow(self) -> None:
        old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
        for at in range(0, len(old), 2):
            if second := old[at + 1]:
                slot, _ = self._find(old[at], second >> _ROW_BITS << _ROW_BITS)
                self._slots[slot], self._slots[slot + 1] = old[at], second


def _digest(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode(), digest_size=11).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big") << _ROW_BITS
