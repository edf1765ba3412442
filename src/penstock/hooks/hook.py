"""The user's own code of a config: found by its name, created and called.

Plain functions run in threads, coroutines on the loop; errors are translated.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from penstock.config import LLMConfig
from penstock.config.derive.serve_options import runtime_env
from penstock.errors import BadRequest, ConfigError, Error, OwnCodeFailed

log = logging.getLogger(__name__)

PREPROCESSOR, POSTPROCESSOR = "preprocessor", "postprocessor"

_CODE = {"working_dir", "py_modules", "py_executable", "pip", "uv", "conda", "image_uri", "container"}
"""Keys of a runtime_env that make other modules importable."""

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
        """A class is instantiated with its `arguments` and, if it takes one, the `llm_config`.

        field: `preprocessor` or `postprocessor`.
        Raises: ConfigError with its place when it cannot be imported or created.
        """
        self._field = field
        try:
            found, given = _resolved(config, field)
            self._ask: Callable[..., Any] = found(**given) if isinstance(found, type) else found
        except Exception as error:  # runs the user's code
            fault = f"{_shown(getattr(config, field))} cannot be made: {_why(error)}."
            raise ConfigError((config.location / field).says(fault)) from error
        self._takes_context = takes(self._ask, 2)
        called: Any = getattr(self._ask, "__call__", None)  # noqa: B004 - of an object that is called
        self._waits = any(map(inspect.iscoroutinefunction, (self._ask, called)))
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
        clients = self._field == PREPROCESSOR
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


class Threads:
    """Threads for the user's plain functions, so that ours never wait for them; none before it is needed."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix=name)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's result, called in the context of the running task."""
        inside, loop = contextvars.copy_context(), asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: inside.run(_called, function, arguments))


def _called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Raises: RuntimeError for an exception that would end the event loop, or block its caller for ever."""
    try:
        return function(*arguments)
    except (StopIteration, SystemExit) as error:
        raise RuntimeError(f"It raised {error!r}.") from error


def problems(config: LLMConfig) -> list[str]:
    """A sentence, with its place, for every hook that cannot be found, created or called. Creates none.

    What a runtime_env brings to the replicas need not be here.
    """
    found: list[str] = []
    for hook in (PREPROCESSOR, POSTPROCESSOR):
        if (named := getattr(config, hook)) is None:
            continue
        try:
            _resolved(config, hook)
        except Exception as error:  # runs the user's code
            if isinstance(error, ImportError) and _brings_code(config, hook):
                continue  # it may exist when the replica starts; if not, that is reported then
            found.append((config.location / hook).says(f"{_shown(named)} cannot be used: {_why(error)}."))
    return found


def takes(ask: Callable[..., Any], count: int) -> bool:
    """Whether it takes so many arguments: with the second one, the context."""
    try:
        inspect.signature(ask).bind(*[None] * count)
    except TypeError:
        return False
    return True


def _brings_code(config: LLMConfig, field: str) -> bool:
    actor = (getattr(config, f"{field}_options") or {}).get("ray_actor_options") or {}
    return not _CODE.isdisjoint({**runtime_env(config), **(actor.get("runtime_env") or {})})


def _resolved(config: LLMConfig, field: str) -> tuple[Any, dict[str, Any]]:
    """The hook of `field`, and the constructor arguments of a class.

    Raises: what importing it raises; TypeError for what cannot be created, or called with a request.
    """
    called = found = getattr(config, field)
    if isinstance(found, str):
        module, _, name = found.partition(":")
        called = found = getattr(importlib.import_module(module), name)
    options: Mapping[str, Any] = getattr(config, f"{field}_options") or {}
    given, filled = dict(options.get("arguments", {})), 0  # filled: leading parameters, such as `self`
    if isinstance(found, type):
        if "llm_config" in inspect.signature(found).parameters:
            given.setdefault("llm_config", config)
        inspect.signature(found).bind(**given)
        called = next((vars(kind)["__call__"] for kind in found.__mro__ if "__call__" in vars(kind)), None)
        filled = 1
        if called is None:
            raise TypeError("it has no method `__call__(self, request)`")
    elif given:
        raise TypeError("`arguments` are for a class, and this is none")
    elif not callable(found):
        raise TypeError("it is not callable")
    for code in (called, getattr(called, "__call__", None)):  # noqa: B004 - of an object that is called
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise TypeError("it yields; it must return one value")
    if not (takes(called, filled + 1) or takes(called, filled + 2)):
        raise TypeError(f"it takes {inspect.signature(called)}; it must take (request) or (request, context)")
    return found, given


def _shown(named: Any) -> str:
    return repr(named) if isinstance(named, str) else getattr(named, "__name__", repr(named))


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
