"""Where the core's messages wait for the front-end: the tokens of one request that wait become one output.

Each step of the core is a message. While the front-end is busy, steps pile up, and each costs it as much as
one that came in time: detokenizing, statistics, an event for the client. Joined, they cost as much as one.
Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
from operator import attrgetter, is_
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

_SAMPLE = EngineCoreOutput("", [])
_MORE = attrgetter(*EngineCoreOutput.__struct_fields__[2:])
_NOTHING_MORE = _MORE(_SAMPLE)


class WaitingOutputs:
    """Joins messages in `queue`, from which vLLM's output handler takes them."""

    def __init__(self, queue: asyncio.Queue[Any]) -> None:
        self._queue = queue
        self._put = queue.put_nowait
        self._latest: EngineCoreOutputs | None = None
        self._count = 0  # of messages so far
        self._waiting: dict[str, tuple[int, EngineCoreOutput]] | None = None  # by request, with its message's
        queue.put_nowait = self.put_nowait

    def put_nowait(self, item: EngineCoreOutputs | Exception) -> None:
        """In place of the queue's own. A message that finds none waiting passes as it is."""
        latest, self._latest = self._latest, item if isinstance(item, EngineCoreOutputs) else None
        if self._latest is None or latest is None or self._queue.empty() or not _same_weights(latest, item):
            self._waiting = None
        else:
            if self._waiting is None:
                self._waiting = {}
                latest.outputs = self._joined(latest, self._count - 1)
            self._latest.outputs = self._joined(self._latest, self._count)
        self._count += 1
        self._put(item)

    def _joined(self, message: EngineCoreOutputs, number: int) -> list[EngineCoreOutput]:
        """The outputs of a message that are left after tokens were added to those that wait."""
        return [output for output in message.outputs if not self._joins(output, number)]

    def _joins(self, output: EngineCoreOutput, number: int) -> bool:
        assert self._waiting is not None
        found, earlier = self._waiting.pop(output.request_id, (-1, output))
        if not all(map(is_, _MORE(output), _NOTHING_MORE)):
            return False  # what follows it must not come before it
        if found < self._count - self._queue.qsize():  # there is none, or its message has been taken
            self._waiting[output.request_id] = number, output
            return False
        earlier.new_token_ids += output.new_token_ids
        self._waiting[output.request_id] = found, earlier
        return True


def _same_weights(one: EngineCoreOutputs, other: object) -> bool:
    """Whether the same version of them made both; before vLLM 0.32 messages name none."""
    return getattr(one, "weight_version", None) == getattr(other, "weight_version", None)
