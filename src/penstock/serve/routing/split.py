"""Which version of a model answers a request, and which others may where it cannot."""

from __future__ import annotations

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from penstock.config.schema.versions import VersionConfig

_HASH_BYTES = 8


class Splits:
    """The versions of all models of one gateway, by id, with their weights as they are now."""

    def __init__(self) -> None:
        self._versions: dict[str, VersionConfig] = {}
        self._weights: dict[str, dict[str, float]] = {}

    def follow(self, versions: Mapping[str, VersionConfig]) -> None:
        """Takes over what the config says. versions: by id."""
        self._versions = dict(versions)
        weights = defaultdict[str, dict[str, float]](dict)
        for model_id, version in versions.items():
            weights[version.of][model_id] = version.weight
        self._weights = dict(weights)

    def pick(self, ids: Sequence[str], key: str) -> str:
        """One of these versions of a model. key: requests of one key stay together; "" for none."""
        weights = self._weights[self._versions[ids[0]].of]
        return pick({one: weights[one] for one in ids}, key)

    def others(self, model_id: str) -> Sequence[str]:
        """Versions of the same model that have a weight, too."""
        if (version := self._versions.get(model_id)) is None:
            return ()
        weights = self._weights[version.of]
        return [other for other, weight in weights.items() if weight and other != model_id]

    def shares(self) -> dict[str, float]:
        """Of its model's requests, by id. Between 0 and 1."""
        return {
            model_id: weight / (sum(weights.values()) or 1.0)
            for weights in self._weights.values()
            for model_id, weight in weights.items()
        }


def pick(weights: Mapping[str, float], key: str) -> str:
    """By weight: at random, or by a key, for which every gateway gives the same.

    A key moves only to a version whose part of the weights grows. Without any weight it is the first one.
    Source: rendezvous hashing with weights (Schindelhauer and Schomaker, 2005).
    """
    if not any(weights.values()):
        return next(iter(weights))
    if not key:
        return random.choices([*weights], [*weights.values()])[0]
    return max(weights, key=lambda one: _score(one, weights[one], key))


def _score(model_id: str, weight: float, key: str) -> float:
    digest = hashlib.blake2b(f"{model_id}\0{key}".encode(), digest_size=_HASH_BYTES).digest()
    part = (int.from_bytes(digest) + 1) / (256**_HASH_BYTES + 1)  # above 0, below 1
    return -weight / math.log(part)
