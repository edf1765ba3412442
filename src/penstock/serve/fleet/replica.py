"""What a gateway knows of one replica, the slots that its requests hold there, and which replicas failed one.

The table keeps these up to date; routing policies only read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.transport.address import Address

REQUEST_TOKENS = 256
"""Cost of one open request in waiting prompt tokens: about 100 tokens left to decode, each a few times as
expensive as a prefill token."""

_BATCH_WAITS = 8
"""One batch request waits in a replica for so many that may run, so that none of their seats stays empty."""


@dataclass(eq=False, slots=True)
class Replica:
    """What this gateway knows about one replica. Units: requests, and tokens where the name says so.

    in_flight: this gateway's, exact. elsewhere: other gateways', as last reported. reported: running and
    waiting in the engine, as last reported, from all gateways; in_flight_then: this gateway's at that time.
    waiting_tokens: of prompts that are there and not yet prefilled, as last reported; sent_tokens: of prompts
    sent since.
    kv_tokens: size of its KV cache, once it has reported it. batch_limit: batch requests that may run there,
    None for all; batch: those that run or wait there, as last reported, corrected as `busy` is. serves: as in
    `LoadReport`.
    """

    model_id: str
    address: Address
    state: str = "unknown"
    in_flight: int = 0
    elsewhere: int = 0
    reported: int = 0
    in_flight_then: int = 0
    waiting_tokens: int = 0
    sent_tokens: int = 0
    kv_tokens: int | None = None
    hellos: int = 0
    reports: int = 0
    batch_limit: int | None = None
    batch: int = 0
    batch_requeued: int = 0
    serves: str = ""
    counted: tuple[int, int] = (0, 0)
    """What this one contributes to the candidates' sums `busy` and `elsewhere`."""

    @property
    def id(self) -> str:
        return self.address.replica_id

    @property
    def busy(self) -> int:
        """Requests in it now: the last report, corrected by what this gateway has sent and finished since."""
        return max(self.in_flight + self.elsewhere, self.reported + self.in_flight - self.in_flight_then)

    @property
    def takes_batch(self) -> bool:
        """Whether one more batch request would soon run there."""
        limit = self.batch_limit
        return limit is None or self.batch < limit + max(2, limit // _BATCH_WAITS)

    @property
    def load_tokens(self) -> int:
        """Its outstanding work: waiting prompt tokens, plus `REQUEST_TOKENS` for every request."""
        return self.waiting_tokens + self.sent_tokens + REQUEST_TOKENS * self.busy


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot in a replica, held by one request until `Table.release`."""

    replica: Replica
    tokens: int
    report: int
    adapter: str = ""
    batch: bool = False


class Tried:
    """Replicas that failed one request. One may be tried again after its next report: a dead one sends none,
    and one that was too busy to accept a connection does.

    serves: once its stream has begun, what a replica must serve to continue it; others count as tried.
    """

    __slots__ = ("_refused", "_reports", "serves")

    def __init__(self) -> None:
        self._reports: dict[Replica, int] = {}
        self._refused: set[Replica] = set()
        self.serves = ""

    def add(self, replica: Replica, refused: bool = False) -> None:
        """refused: it is not tried again."""
        self._reports[replica] = replica.reports
        if refused:
            self._refused.add(replica)

    def __contains__(self, replica: object) -> bool:
        if not isinstance(replica, Replica):
            return False
        others = replica in self._refused or bool(self.serves and replica.serves != self.serves)
        return others or self._reports.get(replica) == replica.reports

    def has_failed(self, replica: Replica) -> bool:
        """Also where it may be tried again."""
        return replica in self._reports or replica in self

    def __len__(self) -> int:
        return len(self._reports)
