"""Groups rows by prompt prefix, so that one engine runs them in sequence and computes the prefix once; and
groups by model, so that an engine visits its adapters one after another.

Used by the queue. Knows the request bodies of OpenAI's endpoints, and no engine.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import msgspec

from penstock.data.rows.request import RowRequest

SHARED_BYTES = 256
"""Rows form a group when they share this much beyond the prefix common to all rows: some 64 tokens, four
blocks of a KV cache."""

_MAX_PREFIX_BYTES = 8192
"""Of each prefix; rows that differ only after it are in one group."""


@dataclass(slots=True)
class PendingRow:
    """A row to run. prefix: the start of its prompt. Mutable, since deaths are counted.

    crashed_in: the engine that last died with this row; if there is another engine, that one gets the row.
    """

    number: int
    request: RowRequest
    key: str | None = None
    deaths: int = 0
    prefix: bytes = b""
    crashed_in: str | None = None


class _PromptFields(msgspec.Struct):
    """The parts of a body that go into the prompt, in the order of chat templates."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_PromptFields).decode


def prompt_prefix(request: RowRequest) -> bytes:
    """The start of the prompt; prefixes of different models are never equal."""
    try:
        body = _decode(request.body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return request.body[:_MAX_PREFIX_BYTES]
    model = (request.model or "").encode()
    texts = map(bytes, (body.tools, body.system, body.messages, body.prompt, body.input))
    return b"\0".join([model, *(text[:_MAX_PREFIX_BYTES] for text in texts if text)])[:_MAX_PREFIX_BYTES]


@dataclass(eq=False, slots=True)
class PrefixGroup:
    """Rows with a common prefix. model: which they name, an adapter's name included. number: never 0."""

    key: bytes | int
    model: str
    number: int
    rows: deque[PendingRow] = field(default_factory=deque["PendingRow"])


class PrefixGroups:
    """Waiting rows by prefix; groups of a model, and rows in a group, in the order of the input.

    A row without a common prefix is a group of one, so that the order of a model's rows stays without common
    prefixes. A worker gets all groups of one model before those of another.
    """

    def __init__(self, *, separate: bool) -> None:
        """separate: every row is a group of one."""
        self._separate = separate
        self._common: int | None = None
        self._by_prefix: dict[bytes | int, PrefixGroup] = {}
        self._unassigned: dict[str, deque[PrefixGroup]] = {}  # by model
        self._assigned: dict[str, PrefixGroup] = {}
        self._models: dict[str, str] = {}  # of each worker's last group
        self._made = 0

    def add(self, rows: Sequence[PendingRow]) -> None:
        if self._common is None and rows:
            prefixes = [row.prefix for row in rows]
            self._common = len(commonprefix(prefixes)) if len(rows) > 1 else 0  # noqa: RUF071, of bytes
        for row in rows:
            key = row.number if self._separate else row.prefix[: (self._common or 0) + SHARED_BYTES]
            group = self._by_prefix.get(key)
            if group is None:
                self._made += 1
                model = "" if self._separate else row.request.model or ""
                group = self._by_prefix[key] = PrefixGroup(key, model, self._made)
                self._unassigned.setdefault(model, deque()).append(group)
            group.rows.append(row)

    def next(self, worker: str) -> PendingRow | None:
        """From the worker's group, else a group without a worker, else the last row of the largest group."""
        group = self._assigned.get(worker)
        if group is None and self._unassigned:
            group = self._assigned[worker] = self._next_group(worker)
        if group is not None:
            return self._take(group, group.rows.popleft())
        largest = max(self._assigned.values(), key=lambda group: len(group.rows), default=None)
        return self._take(largest, largest.rows.pop()) if largest is not None else None

    def release(self, worker: str) -> None:
        """The rest of the worker's group is free for another worker."""
        self._models.pop(worker, None)
        if (group := self._assigned.pop(worker, None)) is not None:
            self._unassigned.setdefault(group.model, deque()).appendleft(group)

    def _next_group(self, worker: str) -> PrefixGroup:
        """Of the worker's model while it has any, else of the model that the fewest workers have."""
        model = self._models.pop(worker, "")
        if model not in self._unassigned:
            workers = Counter(self._models.values())
            model = min(self._unassigned, key=lambda name: workers[name])
        self._models[worker] = model
        groups = self._unassigned[model]
        group = groups.popleft()
        if not groups:
            del self._unassigned[model]
        return group

    def _take(self, group: PrefixGroup, row: PendingRow) -> PendingRow:
        if not self._separate:
            row.request = msgspec.structs.replace(row.request, group=group.number)
        if not group.rows:
            del self._by_prefix[group.key]
            for worker in [worker for worker, one in self._assigned.items() if one is group]:
                del self._assigned[worker]
        return row
