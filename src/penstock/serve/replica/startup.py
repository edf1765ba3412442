"""Starts a replica's engine within its time limit, and the user's hooks before it; reports each phase."""

from __future__ import annotations

import asyncio
import logging

from penstock import progress
from penstock.config import LLMConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, EngineStartFailed, Error
from penstock.hooks import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.layers.adapters import Store
from penstock.request_context import gang
from penstock.serve.replica.gang import GangLink

log = logging.getLogger(__name__)


def make_hooks(config: LLMConfig, *, own_preprocessor: bool) -> tuple[Hook | None, Hook | None]:
    """The user's preprocessor, if it runs in this process, and postprocessor.

    Raises: ConfigError when one cannot be made: before the engine starts, which takes longer.
    """
    try:
        before = Hook(config, PREPROCESSOR) if config.preprocessor is not None and own_preprocessor else None
        after = Hook(config, POSTPROCESSOR) if config.postprocessor is not None else None
    except ConfigError as error:
        progress.report(config.model_id, progress.FAILED, str(error))
        raise
    return before, after


async def start_engine(
    engine: Engine, config: LLMConfig, adapters: Store | None, gang_link: GangLink | None
) -> None:
    """Within `engine_start_timeout_s`; an engine that failed is stopped. Raises: EngineStartFailed."""
    model_id, limit_s = config.model_id, config.engine_start_timeout_s
    phase = "starting"

    def reached(name: str) -> None:
        nonlocal phase
        phase = name
        log.info("%s: %s", model_id, name)
        progress.report(model_id, name)

    gang.set(gang_link.gang if gang_link else None)
    try:
        async with asyncio.timeout(limit_s):
            await engine.start(reached)
            if adapters:
                await _start_adapters(adapters, model_id)
    except (TimeoutError, EngineStartFailed) as error:
        failure = error if isinstance(error, EngineStartFailed) else _too_slow(model_id, limit_s, phase)
        progress.report(model_id, progress.FAILED, str(failure))
        await engine.stop()
        raise failure from error


async def _start_adapters(adapters: Store, model_id: str) -> None:
    try:
        await adapters.start()
    except Error as error:
        raise EngineStartFailed(
            f"Model '{model_id}' cannot start with its pinned adapters: {error}"
        ) from error


def _too_slow(model_id: str, limit_s: float, phase: str) -> EngineStartFailed:
    return EngineStartFailed(
        f"The engine of model '{model_id}' was not ready after {limit_s:g} s (last phase: {phase}). "
        "Raise engine_start_timeout_s if the model needs longer to load."
    )
