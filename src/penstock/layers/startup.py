"""Starts an engine, and its adapters, within the config's time limit: in a replica and in batch alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from penstock.engine import Engine, Progress
from penstock.errors import EngineStartFailed, Error
from penstock.hooks import Hook
from penstock.layers.adapters import Store

if TYPE_CHECKING:
    from penstock.config import LLMConfig


def make_hook(config: LLMConfig, field: str) -> Hook | None:
    """The user's code in `field`, if there is any. Call it before the engine starts, which takes longer.

    Raises: ConfigError when it cannot be made.
    """
    return None if getattr(config, field) is None else Hook(config, field)


async def start_engine(engine: Engine, config: LLMConfig, adapters: Store | None, progress: Progress) -> None:
    """An engine that failed is stopped. Raises: EngineStartFailed, also after `engine_start_timeout_s`."""
    model_id, limit_s = config.model_id, config.engine_start_timeout_s
    phase = "starting"

    def reached(name: str) -> None:
        nonlocal phase
        phase = name
        progress(name)

    try:
        async with asyncio.timeout(limit_s):
            await engine.start(reached)
            if adapters is not None:
                await _start_adapters(adapters, model_id)
    except BaseException as error:
        await engine.stop()
        if not isinstance(error, TimeoutError):
            raise
        raise EngineStartFailed(
            f"The engine of model '{model_id}' was not ready after {limit_s:g} s (last phase: {phase}). "
            "Raise engine_start_timeout_s if the model needs longer to load."
        ) from error


async def _start_adapters(adapters: Store, model_id: str) -> None:
    try:
        await adapters.start()
    except Error as error:
        raise EngineStartFailed(
            f"Model '{model_id}' cannot start with its pinned adapters: {error}"
        ) from error
