"""Shared by policies: replicas at random, and how far affinity may overload one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica

OVER_SHARE = 1.5
"""A replica gets no request for affinity while its requests exceed this many times the mean."""

OVER_SPARE = 2
"""Nor while they exceed `ALWAYS` + this many times those of an alternative replica."""

ALWAYS = 4
"""Requests that affinity may always bring to one replica, however idle the others are: an engine runs a
handful nearly as fast as one, and their common prefix is computed once.
"""


def two(candidates: Sequence[Replica]) -> tuple[Replica, Replica]:
    """Two different replicas at random; a single one twice. There must be at least one."""
    count = len(candidates)
    first = int(random.random() * count)
    second = (first + 1 + int(random.random() * (count - 1))) % count
    return candidates[first], candidates[second]


def neighbours(replicas: Sequence[Replica], most: int) -> Sequence[Replica]:
    """Up to `most` of them: those from a random position on, then the first ones."""
    start = int(random.random() * len(replicas))
    found = replicas[start : start + most]
    return found if len(found) == most else [*found, *replicas[: min(start, most - len(found))]]


def some(replicas: Sequence[Replica], most: int) -> Sequence[Replica]:
    """All in their order, or `most` neighbours where there are more."""
    return replicas if len(replicas) <= most else neighbours(replicas, most)


def share(candidates: Candidates, spare: Replica | None = None) -> float:
    """Most requests that a replica may have, the new one included, to get it for affinity.

    spare: an alternative replica; affinity loads no replica beyond `OVER_SPARE` times its load.
    Source: Mirrokni, Thorup, Zadimoghaddam, Consistent hashing with bounded loads, 2016.
    """
    most = OVER_SHARE * (candidates.busy + 1) / max(1, candidates.ready)
    if spare is not None:
        most = min(most, ALWAYS + OVER_SPARE * spare.busy)
    return max(ALWAYS, most)
