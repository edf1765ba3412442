"""The Engine protocol and the values that cross it.

Above it: the replica (`serve.server`) and batch (`data`). Below it: one adapter per engine in `engines/`.
It knows neither Ray nor HTTP servers; an engine speaks HTTP through the ASGI app that it hands out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.config import LLMConfig

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

Progress = Callable[[str], None]
"""Is told the name of each phase as it begins, in the caller's event loop: "import", "load", "warm up"."""

Prompt = str | list[int] | Mapping[str, Any]
"""Text, token ids, or the engine's own dict (`prompt`, `prompt_token_ids`, `multi_modal_data`), untouched."""


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine feels right now. Units: requests, tokens; kv_usage as a share from 0 to 1."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to one output of a request.

    Units: prompt_tokens and cached_tokens count tokens of the whole prompt.
    finish_reason is "stop", "length" or "abort" on the last delta of an output, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: Any = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Where an engine's time for one request went, until now. Units: seconds; None for what has not begun."""

    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


class Watch:
    """Set in a request's context by whoever wants to know `Spent`; given a way to ask by the engine."""

    __slots__ = ("ask",)

    def __init__(self) -> None:
        self.ask: Callable[[], Spent] | None = None


watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


def watched(ask: Callable[[], Spent]) -> None:
    """Called by an engine when it takes a request. Of several in one HTTP request the first is told of."""
    found = watch.get()
    if found is not None and found.ask is None:
        found.ask = ask


class Shortcut(Protocol):
    """A way for pieces of an answer that has begun, past the layers of the engine's app."""

    @property
    def open(self) -> bool:
        """Whether it may be taken. What went by the app before comes before, what goes by it later after."""
        ...

    def push(self, piece: bytes) -> bool:
        """Sends now. False when the reader is behind: await `room` before the next one."""
        ...

    async def room(self) -> None:
        """Returns when the next piece may follow."""
        ...


shortcut: ContextVar[Shortcut | None] = ContextVar("shortcut", default=None)
"""Set in a request's context by whoever serves the engine's app; an engine need not know it."""


def silent(phase: str) -> None:
    """The `Progress` of those who do not ask."""


class Engine(Protocol):
    """One model on one set of devices. Nothing happens before `start`."""

    def __init__(self, config: LLMConfig) -> None: ...

    async def start(self, progress: Progress = silent) -> None:
        """Load the model and make one token. Does nothing when it has been done.

        Raises: EngineStartFailed with the engine's real reason.
        """
        ...

    async def stop(self) -> None:
        """Free the devices and end every process that `start` made. Safe to call twice or before `start`."""
        ...

    def app(self) -> ASGIApp:
        """Its HTTP endpoints, with errors in the OpenAI envelope. A closed connection aborts its request."""
        ...

    def generate(
        self, prompt: Prompt, params: Mapping[str, Any], *, request_id: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Stream of deltas; closing it aborts the request inside the engine.

        params: sampling parameters by their OpenAI or vLLM names (`max_tokens`, `temperature`, `stop`, ...).
        Raises: BadRequest, PromptTooLong, EngineDead.
        """
        ...

    async def check_health(self) -> None:
        """Raises: EngineDead when the engine cannot answer any more."""
        ...

    async def wait_dead(self) -> str:
        """Returns the reason as soon as the engine has died by itself; never returns while it lives."""
        ...

    def load(self) -> Load:
        """Cheap, synchronous, never raises."""
        ...

    def kv_tokens(self) -> int | None:
        """Tokens that its KV cache holds; None before `start`, or when it is not known."""
        ...

    def max_model_len(self) -> int | None:
        """Context window in tokens; None before `start`."""
        ...
