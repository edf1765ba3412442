"""Where one request's time goes in the gateway. It is always in exactly one part, and the parts add up.

Parts begin in `app`, `dispatch`, `admission`, `relay` and `response`. They are reported in `Server-Timing`,
in the histograms of `metrics`, and in traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

# Until the first byte. What is in no other part is the gateway's own work.
GATEWAY = "gateway"
RECEIVE = "receive"  # the client's body arrives
PICK = "pick"  # which replica?
QUEUE = "queue"  # all are full, or there is none
CONNECT = "connect"
REPLICA = "replica"  # from the sent request to the first byte of the answer
FAILOVER = "failover"  # at replicas that failed
# After it.
STREAM = "stream"
CONTINUE = "continue"  # from a replica's failure to the first piece from the next one

_OURS = (GATEWAY, PICK, CONNECT)


class Timing:
    """One request's times. Units: seconds; instants are those of its clock."""

    __slots__ = ("failures", "first_byte_at", "laps", "now", "parts", "paused", "replica", "started_at")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self.started_at = clock()
        self.laps = [(GATEWAY, self.started_at)]
        self.first_byte_at: float | None = None
        self.parts: dict[str, float] = {}
        self.failures = 0
        self.paused = False
        self.replica: bytes | None = None

    def begin(self, part: str) -> None:
        """From now on, time counts for `part`, unless the stream has paused."""
        if part != self.laps[-1][0] and not self.paused:
            self.laps.append((part, self.now()))

    def pause(self) -> None:
        """The replica failed after the first byte: all time counts for `CONTINUE` until `resume`."""
        self.begin(CONTINUE)
        self.paused = True

    @property
    def paused_s(self) -> float:
        """How long the stream has paused; 0 while it goes on."""
        return self.now() - self.laps[-1][1] if self.paused else 0.0

    def resume(self) -> float:
        """The stream goes on. Returns how long it paused."""
        self.paused = False
        self.begin(STREAM)
        return self.laps[-1][1] - self.laps[-2][1]

    def failed(self) -> None:
        """The attempt failed: time since the pick of that replica counts as lost."""
        picked = max(i for i, (part, _) in enumerate(self.laps) if part in (PICK, QUEUE))
        vain = self.laps[picked + 1 :]
        self.laps[picked + 1 :] = [(FAILOVER, at) for _, at in vain[:1]]
        self.failures += 1

    def answer(self, replica: bytes | None = None) -> None:
        """The first byte is sent: the durations of the parts are final, in the order in which they began.

        replica: the replica's own durations, in the format of `Server-Timing`.
        """
        self.begin(STREAM)
        self.replica = replica
        self.first_byte_at = self.laps[-1][1]
        for (part, begun), (_, ended) in pairwise(self.laps):
            self.parts[part] = self.parts.get(part, 0.0) + ended - begun

    @property
    def first_byte_s(self) -> float | None:
        """From the request's arrival to the first byte of the response."""
        return None if self.first_byte_at is None else self.first_byte_at - self.started_at

    @property
    def overhead_s(self) -> float:
        """The gateway's share of that."""
        return sum(self.parts.get(part, 0.0) for part in _OURS)

    def header(self) -> bytes:
        """The value of `Server-Timing`, once the first byte is sent."""
        said = [f"{part};dur={seconds * 1e3:.3f}" for part, seconds in self.parts.items()]
        if self.failures:
            said.append(f'attempts;desc="{self.failures + 1}"')
        if self.replica is not None:
            said.append(self.replica.decode("latin-1"))
        said.append(f"total;dur={(self.first_byte_s or 0.0) * 1e3:.3f}")
        return ", ".join(said).encode("latin-1")
