"""`callback_config`: the user's hooks around node initialization, in the replica's process.

The class has the names that users of `ray.serve.llm` know; `prepared` calls its methods, in their order.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import EngineStartFailed

if TYPE_CHECKING:
    from penstock.config import LLMConfig

log = logging.getLogger(__name__)

BEFORE_INIT = "on_before_node_init"
BEFORE_DOWNLOAD = "on_before_download_model_files_distributed"
AFTER_INIT = "on_after_node_init"


@dataclass
class CallbackCtx:
    """What methods may change; each replica has its own.

    run_init_node: whether Penstock fetches files; if not, the model is on this node already, or its hub id is
    left to the engine. model_source: a source in place of the config's. model_files: which of its files to
    fetch: patterns such as `*.json`, or a function of all names. custom_data: the user's own.
    """

    run_init_node: bool = True
    model_source: str | None = None
    model_files: Sequence[str] | Callable[[list[str]], Iterable[str]] | None = None
    custom_data: dict[str, Any] = field(default_factory=dict[str, Any])


class CallbackBase:
    """Hooks around node initialization; override what you need, each as a plain method or `async`.

    Environment variables that they set reach the engine and all of its processes.
    """

    def __init__(
        self,
        llm_config: LLMConfig,
        raise_error_on_callback: bool = True,
        ctx_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """kwargs: the `callback_kwargs` of the config."""
        self.llm_config = llm_config
        self.raise_error_on_callback = raise_error_on_callback
        self.kwargs = kwargs
        self.ctx = CallbackCtx(**(ctx_kwargs or {}))

    def on_before_node_init(self) -> Any:
        """Called first: nothing is fetched yet, no engine imported."""

    def on_before_download_model_files_distributed(self) -> Any:
        """Called before the model's files are fetched; not called when none will be."""

    def on_after_node_init(self) -> Any:
        """Called when the files are here; the engine starts next."""


def made(config: LLMConfig) -> CallbackBase | None:
    """An instance of the config's callback class.

    Raises: EngineStartFailed when it cannot be imported or created.
    """
    wanted = config.callback_config
    if wanted.callback_class is None:
        return None
    try:
        found, stops = _imported(wanted.callback_class), wanted.raise_error_on_callback
        return found(llm_config=config, raise_error_on_callback=stops, **wanted.callback_kwargs)
    except Exception as error:  # runs the user's code
        raise _failed(config, _name(wanted.callback_class), "cannot be made", error) from error


async def call(callback: CallbackBase | None, config: LLMConfig, method: str) -> None:
    """Runs one method, if there is a callback; plain ones in a thread.

    Raises: EngineStartFailed when it fails, unless the config says to only log failures.
    """
    if callback is None:
        return
    step = getattr(callback, method)
    try:
        if inspect.iscoroutinefunction(step):
            await step()
        else:
            await asyncio.to_thread(step)
    except Exception as error:
        failure = _failed(config, f"{type(callback).__name__}.{method}", "failed", error)
        if callback.raise_error_on_callback:
            raise failure from error
        log.exception("%s It goes on, as raise_error_on_callback is false.", failure)


def moved(callback: CallbackBase | None, config: LLMConfig) -> LLMConfig:
    """The config with the source that the callback gave: in `ctx`, or in `get_engine_config()`."""
    if callback is None:
        return config
    told = callback.llm_config.get_engine_config().hf_model_id
    source = callback.ctx.model_source or (told if told != callback.llm_config.model_source else None)
    return config if source is None else config.with_source(source)


def problems(config: LLMConfig) -> list[str]:
    """A sentence, with its place in the config, when the callback's class cannot be found here."""
    wanted = config.callback_config
    if wanted.callback_class is None:
        return []
    try:
        _imported(wanted.callback_class)
    except Exception as error:
        where = config.location / "callback_config" / "callback_class"
        return [
            where.says(f"'{_name(wanted.callback_class)}' cannot be had: {type(error).__name__}: {error}.")
        ]
    return []


def _imported(named: Any) -> type[CallbackBase]:
    if isinstance(named, str):
        module, _, name = named.replace(":", ".").rpartition(".")
        named = getattr(importlib.import_module(module), name)
    if not (isinstance(named, type) and issubclass(named, CallbackBase)):
        raise TypeError("it is no subclass of penstock.serve.CallbackBase")
    return named


def _failed(config: LLMConfig, what: str, how: str, error: Exception) -> EngineStartFailed:
    reason = f"{type(error).__name__}: {error}".rstrip(".")
    return EngineStartFailed(f"Model '{config.model_id}' cannot start: its callback {what} {how}: {reason}.")


def _name(named: Any) -> str:
    return named if isinstance(named, str) else getattr(named, "__name__", repr(named))
