"""Which rows begin alike, so that one engine computes their beginning once and gets them one after another.

Used by the queue; knows bodies of OpenAI's endpoints, and no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.data.rows.request import Request

SHARED_BYTES = 256
"""Rows are of one group when so much more of their beginning is equal than of all rows together: some 64
tokens, four blocks of a KV cache."""

_KEPT_BYTES = 8192
"""Of each beginning; what differs only after that is of one group."""


@dataclass(slots=True)
class Waiting:
    """A row that waits. begin: what the engine reads first of it. Mutable: deaths are counted.

    lost_by: the engine whose process died with it last; another one gets it, where there is one.
    """

    number: int
    request: Request
    key: str | None = None
    deaths: int = 0
    begin: bytes = b""
    lost_by: str | None = None


class _Beginning(msgspec.Struct):
    """What of a body goes into the prompt, in the order in which templates put it there."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Beginning).decode


def beginning(request: Request) -> bytes:
    """What the engine reads first of a request: rows of other models never begin alike."""
    try:
        body = _decode(request.body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return request.body[:_KEPT_BYTES]
    model = (request.model or "").encode()
    texts = map(bytes, (body.tools, body.system, body.messages, body.prompt, body.input))
    return b"\0".join([model, *(text[:_KEPT_BYTES] for text in texts if text)])[:_KEPT_BYTES]


def _alike(one: bytes, other: bytes) -> int:
    """How many bytes they have in common at their beginning."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[:middle] == other[:middle]:
            least = middle
        else:
            most = middle - 1
    return least


@dataclass(eq=False, slots=True)
class Group:
    """Rows that begin alike."""

    key: bytes | int
    rows: deque[Waiting] = field(default_factory=deque["Waiting"])


class Groups:
    """Rows that no worker has, by how they begin; groups, and rows in a group, in the order of the input.

    Rows that share with nobody are groups of their own, so that without common prefixes nothing is moved.
    """

    def __init__(self, *, apart: bool = False) -> None:
        """apart: every row is a group of its own."""
        self._apart = apart
        self._common: int | None = None
        self._by_begin: dict[bytes | int, Group] = {}
        self._free: deque[Group] = deque()
        self._owned: dict[str, Group] = {}

    def add(self, rows: Sequence[Waiting]) -> None:
        if self._common is None and rows:
            begins = [row.begin for row in rows]
            self._common = _alike(min(begins), max(begins)) if len(rows) > 1 else 0
        for row in rows:
            key = row.number if self._apart else row.begin[: (self._common or 0) + SHARED_BYTES]
            group = self._by_begin.get(key)
            if group is None:
                group = self._by_begin[key] = Group(key)
                self._free.append(group)
            group.rows.append(row)

    def next(self, worker: str) -> Waiting | None:
        """Of the group that `worker` has, else of one that nobody has, else the last row of the largest."""
        group = self._owned.get(worker)
        if group is None and self._free:
            group = self._owned[worker] = self._free.popleft()
        if group is not None:
            return self._without(group, group.rows.popleft())
        largest = max(self._owned.values(), key=lambda group: len(group.rows), default=None)
        return self._without(largest, largest.rows.pop()) if largest is not None else None

    def leave(self, worker: str) -> None:
        """What the worker had of a group is free again."""
        if (group := self._owned.pop(worker, None)) is not None:
            self._free.appendleft(group)

    def _without(self, group: Group, row: Waiting) -> Waiting:
        if not group.rows:
            del self._by_begin[group.key]
            for worker in [worker for worker, own in self._owned.items() if own is group]:
                del self._owned[worker]
        return row
