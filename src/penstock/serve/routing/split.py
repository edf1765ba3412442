"""Which version of a model answers a request, and which others may where it cannot."""

from __future__ import annotations

import hashlib
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.config.schema.versions import ShadowConfig, VersionConfig
from penstock.metrics import FIRST_TOKEN, INTER_TOKEN, GatewayMetrics
from penstock.serve.control.state import CanaryReport, CanaryState

_HASH_BYTES = 8


class Splits:
    """The versions of all models of one gateway, by id, with their weights as they are now."""

    def __init__(
        self, metrics: GatewayMetrics | None = None, ready: Callable[[str], object] = lambda model_id: True
    ) -> None:
        """metrics: for what is reported of canaries. ready: whether a version has a replica that is ready."""
        self._metrics, self._ready = metrics, ready
        self._versions: dict[str, VersionConfig] = {}
        self._weights: dict[str, dict[str, float]] = {}
        self._canaries: Mapping[str, CanaryState] = {}
        self._counts = defaultdict[str, list[float]](lambda: [0.0, 0.0])

    def follow(self, versions: Mapping[str, VersionConfig]) -> None:
        """Takes over what the config says. versions: by id."""
        self._versions = dict(versions)
        self._weigh()

    def hear(self, canaries: Mapping[str, CanaryState]) -> None:
        """Takes over what control says."""
        self._canaries = canaries
        self._weigh()

    def _weigh(self) -> None:
        """A canary that control does not know yet gets nothing."""
        weights = defaultdict[str, dict[str, float]](dict)
        for model_id, version in self._versions.items():
            weights[version.of][model_id] = version.weight
        for model_id, version in self._versions.items():
            if version.canary is not None:
                percent = self._state(model_id).percent
                others = {one: weight for one, weight in weights[version.of].items() if one != model_id}
                rest = (100.0 - percent) / (sum(others.values()) or 1.0)
                scaled = {one: weight * rest for one, weight in others.items()}
                weights[version.of] |= {**scaled, model_id: percent}
        self._weights = dict(weights)

    def _key(self, model_id: str) -> str:
        version = self._versions[model_id]
        config = version.canary.model_dump_json() if version.canary is not None else ""
        return f"{version.full_name} {version.revision} {config}"

    def _state(self, model_id: str) -> CanaryState:
        return self._canaries.get(self._key(model_id), CanaryState(0.0))

    def ended(self, model_id: str, *, failed: bool) -> None:
        """Counts a request for which this version was picked."""
        counts = self._counts[model_id]
        counts[0] += 1
        counts[1] += failed

    def reports(self) -> list[CanaryReport]:
        """Of canaries that go on, or could begin: their replicas have started."""
        found: list[CanaryReport] = []
        for model_id, version in self._versions.items():
            if self._is_canary(model_id) and version.canary is not None and self._ready(model_id):
                others = [one for one in self._weights[version.of] if one != model_id]
                counts = [*self._counted([model_id]), *self._counted(others)]
                found.append(CanaryReport(self._key(model_id), version.canary.model_dump(), counts, others))
        return found

    def _is_canary(self, model_id: str) -> bool:
        """Whether it still has to prove itself."""
        return self._versions[model_id].canary is not None and not self._state(model_id).outcome

    def _counted(self, ids: Sequence[str]) -> list[float]:
        assert self._metrics is not None
        rows = [
            [*self._counts[one], *model.numbers(FIRST_TOKEN), *model.numbers(INTER_TOKEN)]
            for one in ids
            for model in [self._metrics.model(one)]
        ]
        return [sum(column) for column in zip(*rows, strict=True)]

    @property
    def has_canary(self) -> bool:
        return any(version.canary is not None for version in self._versions.values())

    def pick(self, ids: Sequence[str], key: str) -> str:
        """One of these versions of a model; a canary only while it is ready, since its start is no failure.

        key: requests of one key stay together; "" for none.
        """
        weights = self._weights[self._versions[ids[0]].of]
        able = [one for one in ids if not self._is_canary(one) or self._ready(one)] or ids
        return pick({one: weights[one] for one in able}, key)

    def others(self, model_id: str) -> Sequence[str]:
        """Versions of the same model that have a weight, too; not a canary that still has to prove itself."""
        if (version := self._versions.get(model_id)) is None:
            return ()
        weights = self._weights[version.of]
        return [
            other
            for other, weight in weights.items()
            if weight and other != model_id and not self._is_canary(other)
        ]

    def shadow(self, model_id: str) -> tuple[str, ShadowConfig] | None:
        """The version that answers this request of `model_id` as well, if any does."""
        for other in self._weights[self._versions[model_id].of]:
            config = self._versions[other].shadow
            if config is not None and other != model_id and random.random() < config.share:
                return other, config
        return None

    def shares(self) -> dict[str, float]:
        """Of its model's requests, by id. Between 0 and 1."""
        return {
            model_id: weight / (sum(weights.values()) or 1.0)
            for weights in self._weights.values()
            for model_id, weight in weights.items()
        }

    def shown(self, model_id: str) -> dict[str, Any]:
        """What clients may see of a version: its share, and how it gets on as a canary."""
        if (version := self._versions.get(model_id)) is None:
            return {}
        canary = {"canary": self._state(model_id).outcome or "goes on"} if version.canary else {}
        return {"share": self.shares()[model_id], **canary}


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
