"""What the policies share: two at random, and how much more than its share a replica may have."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica

OVER_SHARE = 1.5
"""A replica gets no request for affinity's sake while it has more than this many times the mean."""

OVER_SPARE = 2
"""Nor while it has more than this many times what another one has that could take it, and `ALWAYS`."""

ALWAYS = 4
"""Requests that affinity may bring to one replica however idle the others are: an engine works on a handful
nearly as fast as on one, and what they share is then computed once."""


def two(candidates: Sequence[Replica]) -> tuple[Replica, Replica]:
    """Two different ones at random; of one, that one twice. There must be one."""
    count = len(candidates)
    first = int(random.random() * count)
    second = (first + 1 + int(random.random() * (count - 1))) % count
    return candidates[first], candidates[second]


def share(candidates: Candidates, spare: Replica | None = None) -> float:
    """Requests that a replica may have, the new one among them, to get it for affinity's sake.

    spare: another one that could take it; affinity brings no replica over `OVER_SPARE` times what that has.
    Source: Mirrokni, Thorup, Zadimoghaddam, Consistent hashing with bounded loads, 2016.
    """
    most = OVER_SHARE * (candidates.busy + 1) / max(1, candidates.ready)
    if spare is not None:
        most = min(most, ALWAYS + OVER_SPARE * spare.busy)
    return max(ALWAYS, most)
