"""What the policies share: two at random, and how much more than its share a replica may have."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.serve.candidates import Candidates
from penstock.serve.table import Replica

OVER_SHARE = 1.5
"""A replica gets no request for affinity's sake while it has more than this many times the mean."""

ALWAYS = 4
"""Requests that affinity may bring to one replica however idle the others are: an engine works on a handful
nearly as fast as on one, and what they share is then computed once."""


def two(candidates: Sequence[Replica]) -> tuple[Replica, Replica]:
    """Two different ones at random; of one, that one twice. There must be one."""
    count = len(candidates)
    first = int(random.random() * count)
    second = (first + 1 + int(random.random() * (count - 1))) % count
    return candidates[first], candidates[second]


def share(candidates: Candidates) -> float:
    """Requests with which a replica has its share; it may have one that makes it these.

    Source: Mirrokni, Thorup, Zadimoghaddam, Consistent hashing with bounded loads, 2016.
    """
    return max(ALWAYS, OVER_SHARE * (candidates.busy + 1) / max(1, candidates.ready))
