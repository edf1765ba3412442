"""All layers of a model in order, the same before an engine in a replica and in batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.asgi import ASGIApp
from penstock.config.derive.prefill import KV_TRANSFER
from penstock.engine import DirectResponder, Engine
from penstock.layers.adapters import Layer, Store
from penstock.layers.direct import Direct
from penstock.layers.generation import Generation
from penstock.layers.hooks import HookCall
from penstock.layers.postprocessing import Postprocessing
from penstock.layers.prefill import Ask, Prefill
from penstock.layers.preprocessing import Preprocessing

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.hooks import Hook


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
