"""A started engine with everything that a replica, too, has around it: adapters, and the user's own code."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ray

from penstock.engine import ASGIApp, Engine, Progress
from penstock.engines import engine_class
from penstock.errors import EngineStartFailed, Error
from penstock.hooks import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.layers.adapters import Source, Store
from penstock.layers.stack import stacked

if TYPE_CHECKING:
    from penstock.config import LLMConfig


@dataclass(frozen=True, slots=True)
class Model:
    """One engine, and what to ask in its place. Whoever has it stops it."""

    engine: Engine
    app: ASGIApp
    adapters: Store | None

    @classmethod
    async def started(cls, config: LLMConfig, progress: Progress) -> Model:
        """Raises: EngineStartFailed, also after `engine_start_timeout_s`; ConfigError for a hook."""
        if ray.is_initialized():  # else workers that are Ray actors would start a cluster of their own
            os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        before, after = _hook(config, PREPROCESSOR), _hook(config, POSTPROCESSOR)
        engine = engine_class(config)(config)
        adapters = None
        if config.lora_config is not None:
            adapters = Store(engine, Source(config), config.lora_config)
        try:
            async with asyncio.timeout(config.engine_start_timeout_s):
                await engine.start(progress)
                if adapters is not None:
                    await _start(adapters, config)
            app = stacked(engine, config, adapters=adapters, preprocessor=before, postprocessor=after)
        except TimeoutError as error:
            await engine.stop()
            raise EngineStartFailed(
                f"The engine of model '{config.model_id}' was not ready after "
                f"{config.engine_start_timeout_s:g} s. Raise engine_start_timeout_s if it needs longer."
            ) from error
        except BaseException:
            await engine.stop()
            raise
        return cls(engine, app, adapters)

    async def stop(self) -> None:
        if self.adapters is not None:
            await self.adapters.stop()
        await self.engine.stop()


def _hook(config: LLMConfig, field: str) -> Hook | None:
    return None if getattr(config, field) is None else Hook(config, field)


async def _start(adapters: Store, config: LLMConfig) -> None:
    try:
        await adapters.start()
    except Error as error:
        sentence = f"Model '{config.model_id}' cannot start with its pinned adapters: {error}"
        raise EngineStartFailed(sentence) from error
