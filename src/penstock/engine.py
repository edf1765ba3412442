"""The Engine protocol and the values that cross it.

Above it: the replica (`serve.replica`) and batch (`data`). Below it: one adapter per engine in `engines/`.
It knows neither Ray nor HTTP servers; an engine speaks HTTP through the ASGI app that it provides.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.asgi import ASGIApp
from penstock.engine_control import EngineControl

HOST = "_PENSTOCK_HOST"
"""Environment variable: the address at which other nodes reach this one."""

Progress = Callable[[str], None]
"""Called with each phase as it begins, in the caller's event loop: "import", "load", "warm up"."""

Prompt = str | list[int] | Mapping[str, Any]
"""Text, token ids, or the engine's own dict (`prompt`, `prompt_token_ids`, `multi_modal_data`), untouched."""


@dataclass(frozen=True, slots=True)
class Load:
    """An engine's load right now. Units: requests, tokens; kv_usage as a share from 0 to 1.

    unseen: of those running, how many came since its scheduler's last report, and may still have to wait.
    step_s: the 99th percentile of what its steps took lately; 0 when it is not known. seats: how many
    requests can run at a time; 0 when that is not known.
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    unseen: int = 0
    step_s: float = 0.0
    seats: int = 0


def p99_lately(known_s: float, new_s: float) -> float:
    """`Load.step_s` after one more step: up by 9.9 % after a longer one, down by 0.1 % after a shorter one,
    which balances where one of a hundred is longer.
    """
    if not known_s:
        return new_s
    return min(new_s, known_s * 1.099) if new_s > known_s else max(new_s, known_s * 0.999)


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was. logprob: natural logarithm. rank: 1 for the likeliest. text: of the token."""

    token_id: int
    logprob: float
    rank: int | None = None
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to one output of a request.

    Units: prompt_tokens and cached_tokens count tokens of the whole prompt.
    finish_reason is "stop", "length" or "abort" on the last delta of an output, else None.
    logprobs, if requested: for each token itself, then the likeliest others.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[tuple[Logprob, ...], ...] | None = None


def plain_name(adapter: str) -> str:
    """What clients call an adapter that the engine knows as `adapter`: all before the last "@"."""
    return adapter.rpartition("@")[0] or adapter


def no_progress(phase: str) -> None:
    """A `Progress` that does nothing."""


class Engine(Protocol):
    """One model on one set of devices. Nothing happens before `start`."""

    def __init__(self, config: Any) -> None:
        """config: the model's `LLMConfig`."""
        ...

    async def start(self, progress: Progress = no_progress) -> None:
        """Loads the model and makes one token. Does nothing if that is done.

        Raises: EngineStartFailed with the engine's real reason.
        """
        ...

    async def stop(self) -> None:
        """Frees the devices and ends every process of `start`. Safe to call twice or before `start`."""
        ...

    def app(self) -> ASGIApp:
        """Its HTTP endpoints, with errors in the OpenAI envelope. A closed connection aborts its request."""
        ...

    def generate(
        self,
        prompt: Prompt,
        params: Mapping[str, Any],
        *,
        request_id: str | None = None,
        adapter: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream of deltas; closing it aborts the request inside the engine.

        params: sampling parameters by their OpenAI or vLLM names (`max_tokens`, `temperature`, `stop`, ...).
        adapter: one that is loaded; without it, `using_adapter`.
        Raises: BadRequest, PromptTooLong, EngineDead.
        """
        ...

    async def load_adapter(self, name: str, path: Path) -> None:
        """Makes the adapter in folder `path` known as `name`; HTTP requests call it `model:name`.

        A name stands for the same weights for ever: caches are keyed by it. So one that replaces another gets
        a new name, `NAME@...`; responses show its `plain_name`. Does nothing when it is loaded.
        Raises: AdapterBroken, and nothing has changed; Unsupported when the engine was started without room
        for adapters.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Forgets it; frees its memory in the background, when the requests that still use it have ended.

        No new request may name it. Does nothing when it is not loaded.
        """
        ...

    def adapters(self) -> frozenset[str]:
        """Names of those that are loaded."""
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

    @property
    def control(self) -> EngineControl:
        """What can be done to it while it runs. `EngineControl()` has no operations."""
        ...


@runtime_checkable
class DirectResponder(Protocol):
    """What an engine may have beside `Engine`: a shorter way for requests that need little of its app."""

    async def respond(self, path: str, body: bytes, *, request_id: str | None = None) -> bytes | None:
        """The body of the app's response to a POST of `body`.

        request_id: for the response's id; random without it. None for a request that the app has to answer,
        also with an error. Cancelling it aborts the request in the engine.
        Raises: EngineDead; Error when the engine failed on it.
        """
        ...


_EARLIER = {
    **dict.fromkeys(("Message", "Receive", "Scope", "Send"), ("penstock.asgi", "")),
    "DEFAULT_WEIGHTS": ("penstock.engine_control", ""),
    "Manner": ("penstock.engine_control", "PauseMode"),
    **dict.fromkeys(
        ("Gang", "Shortcut", "gang", "shortcut", "using_adapter"), ("penstock.request_context", "")
    ),
    "Prepared": ("penstock.request_context", "PreparedPrompt"),
    "Spent": ("penstock.request_context", "EngineTimings"),
    "kept_here": ("penstock.request_context", "current_replica"),
    "prepared": ("penstock.request_context", "prepared_prompt"),
    "watched": ("penstock.request_context", "report_timings"),
    "silent": ("penstock.engine", "no_progress"),
}
"""Names that users' engines may import from here: module, and today's name where it is another."""


def __getattr__(name: str) -> Any:
    if name not in _EARLIER:
        raise AttributeError(f"module 'penstock.engine' has no attribute '{name}'")
    module, now = _EARLIER[name]
    return getattr(import_module(module), now or name)
