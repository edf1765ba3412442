"""The contract of routing policies: request in, pick out. Policies see no bytes, no sockets and no clock."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import msgspec

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.fleet.replica import Replica

Reads = Literal["prompt", "session"]
"""Features that a policy may read beside adapter and size, which cost nothing."""


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """One request as routing sees it. Features that the policy does not read are empty.

    adapter: the part of the model's name after its base. tokens: of the prompt, estimated from its size.
    session: the client's name of the conversation or user.
    blocks: a hash for each block of the prompt, of all that goes before and the block itself: equal blocks at
    equal places mean equal prefixes. Where they end is `prefix_hashes.ENDS`. In this process only.
    home: a hash of how its conversation begins, the same in every process.
    chosen: id of the replica that a router of Ray Serve's kind has picked; "" without one.
    """

    adapter: str = ""
    session: str = ""
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    home: int = 0
    chosen: str = ""


class Pick(NamedTuple):
    """The chosen replica and a one-word reason, a label of `penstock_picks_total`.

    saved_tokens: prompt tokens that are probably cached there.
    """

    replica: Replica
    why: str = "balance"
    saved_tokens: int = 0


class Policy(Protocol):
    """Which replica gets a request. Users' classes need this one method; those below are optional.

    A class attribute `reads`, a tuple of `Reads`, names the features that it reads.
    """

    def pick(self, asked: RoutingRequest, candidates: Candidates, now: float) -> Pick | None:
        """One of `candidates`; None to let the request wait. Must take microseconds only.

        Units: now in seconds, from any start, never going back.
        """
        ...


@runtime_checkable
class Learns(Protocol):
    """A policy that remembers where requests went."""

    def sent(self, asked: RoutingRequest, replica: Replica, now: float) -> None:
        """`asked` was sent to `replica`: by a pick, or from the queue to the first replica with room."""
        ...
