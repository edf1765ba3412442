"""All layers of a model in order, and how its engine starts: the same in a replica and in batch."""

from __future__ import annotations

import asyncio

from penstock.asgi import ASGIApp
from penstock.config import LLMConfig
from penstock.config.derive.prefill import KV_TRANSFER
from penstock.engine import DirectResponder, Engine, Progress
from penstock.errors import EngineStartFailed, Error
from penstock.hooks.hook import Hook
from penstock.layers.adapters import Layer, Store
from penstock.layers.direct import Direct
from penstock.layers.generation import Generation
from penstock.layers.postprocessing import Postprocessing
from penstock.layers.prefill import Ask, Prefill
from penstock.layers.preprocessing import HookCall, Preprocessing


def stacked(
    engine: Engine,
    config: LLMConfig,
    *,
    adapters: Store | None,
    preprocessor: HookCall | None,
    postprocessor: Hook | None,
    prefill: Ask | None = None,
    role: str = "",
) -> ASGIApp:
    """The app of a started `engine`, behind the layers that the model has. role: as in `ReplicaStatus`."""
    app = engine.app()
    if isinstance(engine, DirectResponder):
        app = Direct(app, engine)
    app = Generation(app, engine)
    if preprocessor is not None:
        app = Preprocessing(app, preprocessor, config)
    if postprocessor is not None:
        app = Postprocessing(app, postprocessor, config)
    if prefill is not None and config.prefill is not None:
        # Before the hooks, which run in the prefill replica, too.
        app = Prefill(app, prefill, config.prefill.min_prompt_tokens)
    elif KV_TRANSFER in config.engine_kwargs and role != "prefill":
        app = Prefill(app)
    return app if adapters is None else Layer(app, adapters)


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
                try:
                    await adapters.start()
                except Error as error:
                    raise EngineStartFailed(
                        f"Model '{model_id}' cannot start with its pinned adapters: {error}"
                    ) from error
    except BaseException as error:
        await engine.stop()
        if not isinstance(error, TimeoutError):
            raise
        raise EngineStartFailed(
            f"The engine of model '{model_id}' was not ready after {limit_s:g} s (last phase: {phase}). "
            "Raise engine_start_timeout_s if the model needs longer to load."
        ) from error
