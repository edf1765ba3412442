"""A loaded hook: plain functions run in threads, coroutines on the loop, errors are translated."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import BadRequest, Error, OwnCodeFailed
from penstock.hooks import loading

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 1000

authors_ask: ContextVar[bool] = ContextVar("authors_ask", default=False)
"""Whether the hooks' own author runs this task, as in batch: failures are shown, not hidden."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a hook can learn beside the request, if it takes a second argument.

    path: the endpoint, such as `/v1/chat/completions`. headers: names in lower case; no credentials.
    notes: empty at first; what the preprocessor leaves here, the postprocessor finds.
    """

    config: LLMConfig
    path: str = ""
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: dict[str, Any] = field(default_factory=dict[str, Any])


class Hook:
    """`await hook(value, context)`. One for a replica or an actor, whatever the number of requests."""

    def __init__(self, config: LLMConfig, field: str) -> None:
        """field: `preprocessor` or `postprocessor`. Raises: ConfigError when it cannot be created."""
        self._field = field
        self._ask = loading.made(config, field)
        self._takes_context = loading.takes_two(self._ask)
        self._waits = _is_async(self._ask)
        self._threads = Threads(field)

    async def __call__(self, value: Any, context: Context) -> Any:
        """The user's result.

        Raises: BadRequest with the text of its ValueError; Error, without details, for anything else.
        """
        try:
            if self._waits:
                return await self.now(value, context)
            answer = await self._threads.run(self.now, value, context)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            raise self.fault(error, context) from error

    def now(self, value: Any, context: Context) -> Any:
        """The same without a thread, for calls many times a second; returns a coroutine as it is.

        Raises: what the user's code raises.
        """
        return self._ask(value, context) if self._takes_context else self._ask(value)

    def fault(self, error: Exception, context: Context) -> Error:
        """`error` of the user's code as an answer."""
        clients = self._field == loading.PREPROCESSOR
        return fault(f"The {self._field} of this model", error, context.request_id, clients=clients)


def fault(what: str, error: Exception, request_id: str, *, clients: bool = True) -> Error:
    """The response error for `error` of the user's code. Unless the client caused it, only the log and the
    author see details.

    clients: a ValueError is about what the client sent.
    """
    if isinstance(error, Error):
        return error
    if clients and isinstance(error, ValueError) and str(error):
        return BadRequest(str(error)[:_SHOWN_CHARACTERS])
    if authors_ask.get():
        return OwnCodeFailed(f"{what} raised {type(error).__name__}: {error}"[:_SHOWN_CHARACTERS])
    log.error("%s failed on request %s", what, request_id, exc_info=error)
    return OwnCodeFailed(f"{what} failed; the log of its replica says why.")


def _is_async(ask: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(ask) or inspect.iscoroutinefunction(getattr(ask, "__call__", None))  # noqa: B004


class Threads:
    """Threads for the user's plain functions, so that ours never wait for them; none before it is needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, called in the context of the running task."""
        if self._pool is None:
            most = min(32, (os.cpu_count() or 1) + 4)  # Python's own default
            self._pool = ThreadPoolExecutor(most, self._name)
        inside = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: inside.run(_called, function, arguments))


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Raises: RuntimeError for an exception that would end the event loop, or block its caller for ever."""
    try:
        return function(*arguments)
    except (StopIteration, SystemExit) as error:
        raise RuntimeError(f"It raised {error!r}.") from error
