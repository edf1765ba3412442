"""What a stream needs to go on at another replica, and how that travels.

A replica records the groups of tokens that its engine's app takes; the multiplexer carries them beside the
pieces that the app makes of them. The gateway keeps the bytes in a `StreamRecord`, and sends them behind the
request's body to the replica that continues. Of an answer that is not streamed, its tokens travel once a
second; a replica that cannot finish it hands over all that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast
from urllib.parse import quote, unquote

import msgspec

from penstock.request_context import ChoiceTokens

RESUMABLE = b"x-penstock-resumable"
"""Header of a response: its stream can be continued, by a replica that is told this value."""
CONTINUE = b"x-penstock-continue"
"""Header of a request that continues a stream: numbers of pieces, groups and bytes, then that value."""
CONTINUED = b"x-penstock-continued"
"""Header of a response: it goes on with the tokens that came with its request."""

_MOST_BYTES = 1 << 20  # of one stream's records: some 200,000 tokens
_MOST_IN_ALL = 256 << 20  # of all streams of a gateway
_RESERVE_BYTES = 256  # at a time
_COUNT = 4  # bytes of the number of groups

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode

Group = Sequence[ChoiceTokens]
Made = tuple[bytes, bytes]
"""Of an answer that has not begun: the value of `RESUMABLE`, and its tokens as `handed` gives them."""
NOTHING_MADE: Made = b"", b""


def encode(recorded: Sequence[Group | None]) -> tuple[int, bytes]:
    """How many groups these are, and their bytes: of one token of a plain answer its id, 3 to 5 bytes."""
    if len(recorded) == 1 and (group := recorded[0]):  # the usual case
        return 1, _encode(_value(group))
    values = [_value(group) for group in recorded if group]
    return len(values), b"".join(map(_encode, values))


def _value(group: Group) -> object:
    one = group[0]
    plain = one.finish_reason is None and not (one.choice or one.cached_tokens or one.logprobs)
    if len(group) == 1 and plain:
        ids = one.token_ids
        return ids[0] if len(ids) == 1 else list(ids)
    return [
        (list(one.token_ids), one.choice, one.finish_reason, one.stop_reason, one.cached_tokens, one.logprobs)
        for one in group
    ]


def handed(recorded: Sequence[Group]) -> bytes:
    """Groups that one replica hands over, for `StreamRecord.take_over`."""
    groups, data = encode(recorded)
    return groups.to_bytes(_COUNT) + data


def decode(groups: int, records: bytes | bytearray) -> list[Group]:
    """The groups that several calls of `encode` have made `records` of. Raises: ValueError."""
    return [_group(value) for value in _decode(b"\xdd" + groups.to_bytes(4) + records)]


def _group(value: Any) -> Group:
    if isinstance(value, int):
        return (ChoiceTokens((value,)),)
    given = cast("list[Any]", value)
    if not given or isinstance(given[0], int):
        return (ChoiceTokens(given),)
    return tuple(ChoiceTokens(*each) for each in given)


def tokens_of(made: Made) -> list[Group]:
    """Raises: ValueError."""
    return decode(int.from_bytes(made[1][:_COUNT]), made[1][_COUNT:])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a stream began. serves: what its tokens follow from beside the request, as replicas report it.

    replica: its id. created: in seconds since the epoch. seed: of random ids. adapter: the stamp of the
    request's adapter, "" without one.
    """

    serves: str
    replica: str
    created: int
    seed: str
    adapter: str = ""

    def to_header(self) -> bytes:
        """The value of `RESUMABLE`."""
        parts = self.serves, self.replica, str(self.created), self.seed, self.adapter
        return ";".join(quote(part, safe="") for part in parts).encode()

    @classmethod
    def from_header(cls, value: bytes) -> Self:
        """Raises: ValueError."""
        serves, replica, created, seed, adapter = map(unquote, value.decode().split(";"))
        return cls(serves, replica, int(created), seed, adapter)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request to go on with a stream. pieces: how many the client has. size: bytes of `groups` groups, at
    the end of the request's body.
    """

    pieces: int
    groups: int
    size: int
    origin: Origin

    @classmethod
    def from_header(cls, value: bytes) -> Self:
        """Raises: ValueError."""
        pieces, groups, size, origin = value.split(b" ")
        return cls(int(pieces), int(groups), int(size), Origin.from_header(origin))

    @classmethod
    def of(cls, made: Made) -> Self:
        """To go on with an answer that has not begun. Raises: ValueError."""
        origin, tokens = made
        groups = int.from_bytes(tokens[:_COUNT])
        return cls(0, groups, len(tokens) - _COUNT, Origin.from_header(origin))


@dataclass(slots=True)
class RecordBudget:
    """Memory for the records of all streams of one gateway, in bytes."""

    reserved: int = 0


@dataclass(eq=False, slots=True)
class StreamRecord:
    """What a gateway keeps of one stream. lost: why it cannot be continued; "" while it can.

    pieces: how many have come. data: `groups` groups, encoded. origin: the value of `RESUMABLE`.
    """

    _budget: RecordBudget
    pieces: int = 0
    groups: int = 0
    data: bytearray = field(default_factory=bytearray)
    origin: bytes = b""
    lost: str = ""
    _reserved: int = 0

    def add(self, pieces: int, groups: int, data: bytes) -> None:
        """More pieces, and groups. What is too large is forgotten."""
        self.pieces += pieces
        self.groups += groups
        self.data += data
        if len(self.data) > self._reserved:
            self._reserve()

    def _reserve(self) -> None:
        size = len(self.data) + _RESERVE_BYTES
        self._budget.reserved += size - self._reserved
        self._reserved = size
        if self.lost or size > _MOST_BYTES or self._budget.reserved > _MOST_IN_ALL:
            self.lose("memory")

    def take_over(self, origin: bytes, handed: bytes) -> None:
        """What a replica that ends hands over of a response that has not begun."""
        self.restart()
        self.add_made(origin, handed)

    def add_made(self, origin: bytes, handed: bytes) -> None:
        """More of a response that has not begun. origin: with the first of it."""
        self.origin = origin or self.origin
        self.add(0, int.from_bytes(handed[:_COUNT]), handed[_COUNT:])

    def made(self) -> Made:
        """What a response that has not begun can go on with."""
        if not self.is_handed_over:
            return NOTHING_MADE
        return self.origin, self.groups.to_bytes(_COUNT) + self.data

    def restart(self) -> None:
        """The request begins anew: nothing of it has been sent to the client."""
        self.close()
        self.pieces, self.origin = 0, b""

    @property
    def is_handed_over(self) -> bool:
        """Whether a response that has not begun can go on with this."""
        return bool(self.origin and self.groups and not self.pieces)

    def lose(self, why: str) -> None:
        """The stream cannot be continued from now on."""
        self.close()
        self.lost = self.lost or why

    def close(self) -> None:
        """Frees its memory."""
        self._budget.reserved -= self._reserved
        self.groups, self.data, self._reserved = 0, bytearray(), 0

    @property
    def serves(self) -> str:
        """What the replica that continues must serve."""
        return unquote(self.origin.split(b";")[0].decode())

    def to_header(self) -> bytes:
        """The value of `CONTINUE`."""
        return b"%d %d %d %b" % (self.pieces, self.groups, len(self.data), self.origin)

    def tokens(self) -> int:
        """How many were recorded."""
        return sum(len(one.token_ids) for group in decode(self.groups, self.data) for one in group)
