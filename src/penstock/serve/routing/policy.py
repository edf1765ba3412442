"""What a routing policy is told, and what it answers. Policies see no bytes, no sockets and no clock."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica

Reads = Literal["prompt", "session"]
"""What a policy may ask for beside the adapter and the size, which cost nothing to know."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as routing knows it. What the policy does not read stays empty.

    adapter: the part of the model's name behind its base. tokens: of the prompt, about, by its size.
    session: what the client calls its conversation or its user.
    blocks: a hash for each block of the prompt, of all that goes before and the block itself: equal blocks at
    equal places mean equal prefixes. Where they end is `blocks.ENDS`. In this process only.
    home: a hash of some beginning of its first turn, the same in every process.
    """

    adapter: str = ""
    session: str = ""
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    home: int = 0


class Pick(NamedTuple):
    """A replica, and in a word why it: a label of `penstock_picks_total`.

    saved_tokens: of the prompt, that need not be computed there, as far as is known.
    """

    replica: Replica
    why: str = "balance"
    saved_tokens: int = 0


class Policy(Protocol):
    """Which replica gets a request. Own classes have this one method, and may have what follows below it.

    A class attribute `reads`, a tuple of `Reads`, asks for fields of `RoutingRequest` that cost something to
    know.
    """

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        """One of `candidates`; None when there is none, and the request waits. Takes microseconds.

        Units: now in seconds, from any start, never going back.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """A policy that remembers where requests went."""

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        """`asked` has gone to `replica`: by a pick, or from the queue to the first that had room."""
        ...
