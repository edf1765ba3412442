"""Context variables that accompany a request, or an engine's start: what HTTP and `generate` do not carry.

Those who call an engine set them; engines read them.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, Self

import msgspec

from penstock.engine import Prompt
from penstock.tiers import DEFAULT, Tier


@dataclass(frozen=True, slots=True)
class EngineTimings:
    """Where an engine's time for one request went, so far. Units: seconds; None for what has not begun."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None

    @classmethod
    def between(
        cls, queued: float, scheduled: float | None, first_token: float | None, last_token: float | None
    ) -> Self:
        """From points in time, as far as they have come."""
        if scheduled is None:
            return cls()
        if first_token is None or last_token is None:
            return cls(scheduled - queued)
        return cls(scheduled - queued, first_token - scheduled, last_token - first_token)


class TimingProbe:
    """Set in a request's context by those who want its `EngineTimings`; the engine sets `ask`."""

    __slots__ = ("ask",)

    def __init__(self) -> None:
        self.ask: Callable[[], EngineTimings] | None = None


timing_probe: ContextVar[TimingProbe | None] = ContextVar("timing_probe", default=None)


def report_timings(ask: Callable[[], EngineTimings]) -> None:
    """Called by an engine when it takes a request. Of several in one HTTP request the first counts."""
    probe = timing_probe.get()
    if probe is not None and probe.ask is None:
        probe.ask = ask


@dataclass(frozen=True, slots=True)
class EventFrame:
    """What stands before and after the text in each event of a stream: texts joined make one event."""

    head: bytes
    tail: bytes

    def around(self, text: bytes) -> bytes:
        """The event. text: as it stands between the quotes of a JSON string."""
        return self.head + text + self.tail


class Shortcut(Protocol):
    """Sends events of a response that has begun past the layers of the engine's app."""

    @property
    def open(self) -> bool:
        """Whether it may be used. Pieces that the app sent before come before, later ones after."""
        ...

    def push(self, frame: EventFrame, text: bytes) -> bool:
        """Sends `text` in an event, with texts of the same stream that still wait here. False when the reader
        is behind: await `room` before the next one.
        """
        ...

    async def room(self) -> None:
        """Returns when the next piece may follow."""
        ...


shortcut: ContextVar[Shortcut | None] = ContextVar("shortcut", default=None)
"""Set in a request's context by the server of the engine's app; engines may ignore it."""


class ChoiceTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one choice of an answer got from its engine.

    finish_reason, stop_reason: the engine's own, with its last tokens. cached_tokens: with its first, of its
    prompt those that a cache held, and those that were put into it, as far as the answer's usage shows them.
    logprobs: of each token, if the request wants them, its own and those of others: id, value, rank, text.
    """

    token_ids: Sequence[int]
    choice: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: Sequence[int] = ()
    logprobs: Sequence[Sequence[tuple[int, float, int | None, str | None]]] = ()


record_tokens: ContextVar[Callable[[Sequence[ChoiceTokens] | None], None] | None] = ContextVar(
    "record_tokens", default=None
)
"""Set in a request's context by a server that can continue a broken answer elsewhere.

An engine that can continue this request, a stream, calls it with all that its app is about to take at once,
before the app makes events of it; an engine that cannot never calls it. None: the request begins anew, before
its app has sent anything.
"""

tokens_before: ContextVar[Sequence[Sequence[ChoiceTokens]]] = ContextVar("tokens_before", default=())
"""Of a request that is continued: what was recorded elsewhere, in the same groups and order.

The engine lets its app take these first, one group after the other, and goes on after them. What the app
makes of them, it made before: the server drops as many events as were sent. They are not recorded again;
instead the engine confirms, by one call of `record_tokens` with an empty group before the first of them.
"""


class TokensProbe:
    """Set in a request's context by those who may have it begun again before anything of its answer was sent.

    adapter: as `adapter_stamp`, where the request has been added; "" without an adapter. weights: the version
    that it began with. forgotten: what was made is of no use any more, here or elsewhere. told: others have
    had tokens of it.
    """

    __slots__ = ("_ask", "_key", "adapter", "forgotten", "told", "weights")

    def __init__(self) -> None:
        self._ask: Callable[[int], Sequence[Sequence[ChoiceTokens]]] | None = None
        self._key: str | None = None  # the engine's, of that adapter
        self.adapter: str | None = None
        self.weights: str | None = None
        self.forgotten = self.told = False

    def report(self, ask: Callable[[int], Sequence[Sequence[ChoiceTokens]]] | None) -> None:
        """Called by an engine that can go on with the request. ask: returns what it has made since the first
        so many tokens, as `tokens_before` of the request that begins again; () for nothing of use.
        """
        self._ask = None if self.forgotten else ask
        self._key = using_adapter.get()
        self.adapter = adapter_stamp.get() if using_adapter.get() else ""

    def ask(self) -> Sequence[Sequence[ChoiceTokens]]:
        """What has been made so far, to be called before the request is aborted."""
        made = self.since(0)
        self._ask = lambda tokens: () if tokens else made  # until it is added again
        return made

    def is_by(self, key: str, stamp: str | None) -> bool:
        """Whether the adapter that the engine knows as `key`, or one that equals it, made what there is."""
        return self._key == key or (stamp is not None and self.adapter == stamp)

    def forget(self) -> None:
        """Has the running request begin anew: what it will make does not go on with what was made."""
        tokens_before.set(())
        self._ask, self.forgotten = None, True

    def compare(self, weights: str) -> None:
        """Has the request, which gets these now, begin anew where others made what it goes on with."""
        if tokens_before.get() and self.weights not in (None, weights):
            self.forget()

    def since(self, tokens: int) -> Sequence[Sequence[ChoiceTokens]]:
        """What has been made after the first `tokens` tokens, as far as that can be told."""
        made = self._ask(tokens) if self._ask is not None else ()
        self.told = self.told or bool(made)
        return made


tokens_so_far: ContextVar[TokensProbe | None] = ContextVar("tokens_so_far", default=None)

created: ContextVar[int] = ContextVar("created", default=0)
"""When the answer to the running request was created, in seconds since the epoch; 0: now. The same where it
is continued."""

id_seed: ContextVar[str] = ContextVar("id_seed", default="")
"""Random for each request and the same where it is continued: for ids within its answer. "" when not set."""

adapter_stamp: ContextVar[str | None] = ContextVar("adapter_stamp", default=None)
"""Of `using_adapter`: the version of its files, the same in all replicas; None when it is not known."""

using_adapter: ContextVar[str | None] = ContextVar("using_adapter", default=None)
"""The loaded adapter of the running request, by the engine's name for it; None for the base model.

Set around a request by the layer that keeps it loaded; used by the engine's app and by `generate`.
"""


tier: ContextVar[Tier] = ContextVar("tier", default=DEFAULT)
"""The class of work of the running request; engines schedule by it, as far as they can."""

start_tag: ContextVar[int] = ContextVar("start_tag", default=0)
"""Its place among those of its class, by its tenant (`StartTags`): lower ones go first."""


current_replica: ContextVar[str] = ContextVar("current_replica", default="")
"""Set in a request's context by a replica, to its id and the tenant's mark: part of the ids of responses that
its engine stores.
"""

response_id: ContextVar[str] = ContextVar("response_id", default="")
"""The id of the response to the running request, if that is one to the Responses endpoint."""


class Pixels:
    """Counts the pixels of all pictures of one request, which several threads load."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def add(self, count: int) -> int:
        """Returns how many they are now."""
        with self._lock:
            self._count += count
            return self._count


pixels: ContextVar[Pixels | None] = ContextVar("pixels", default=None)
"""Of the running request's pictures, counted by engines that read them."""


@dataclass(frozen=True, slots=True)
class Gang:
    """Engines that compute one model together, each in its own replica, and which of them this is.

    rank: from 0 to size - 1. host: where the others reach this one's sockets. share: returns to every member
    what the first one passes; all call it equally often, the others with None.
    """

    rank: int
    size: int
    host: str
    share: Callable[[Mapping[str, Any] | None], Awaitable[Mapping[str, Any]]]


gang: ContextVar[Gang | None] = ContextVar("gang", default=None)
"""Set around the start of an engine in a gang; the others start at the same time."""


class PreparedPrompt:
    """An engine prompt that the user's code made in place of a request's own messages, prompt or input.

    The request then holds `placeholder` there, so that an engine's app finds what to replace.
    """

    __slots__ = ("_prompt", "placeholder", "taken")

    PLACEHOLDER = re.compile("prepared-[0-9a-f]{32}")

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self.placeholder = f"prepared-{uuid.uuid4().hex}"
        self.taken = False

    def take(self) -> Prompt:
        """The prompt, for the engine's own `generate`."""
        self.taken = True
        return self._prompt


prepared_prompt: ContextVar[PreparedPrompt | None] = ContextVar("prepared_prompt", default=None)
"""Set in a request's context by a preprocessor's layer; an engine's app must use it, or refuse."""
