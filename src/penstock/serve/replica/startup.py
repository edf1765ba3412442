"""Starts a replica's engine, and the user's hooks before it; reports each phase to the starting command."""

from __future__ import annotations

import logging

from penstock import progress
from penstock.config import LLMConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, EngineStartFailed
from penstock.hooks import POSTPROCESSOR, PREPROCESSOR, Hook
from penstock.layers import startup
from penstock.layers.adapters import Store
from penstock.request_context import gang
from penstock.serve.replica.gang import GangLink

log = logging.getLogger(__name__)


def make_hooks(config: LLMConfig, *, own_preprocessor: bool) -> tuple[Hook | None, Hook | None]:
    """The user's preprocessor, if it runs in this process, and postprocessor. Raises: ConfigError."""
    try:
        before = startup.make_hook(config, PREPROCESSOR) if own_preprocessor else None
        return before, startup.make_hook(config, POSTPROCESSOR)
    except ConfigError as error:
        progress.report(config.model_id, progress.FAILED, str(error))
        raise


async def start_engine(
    engine: Engine, config: LLMConfig, adapters: Store | None, gang_link: GangLink | None
) -> None:
    """As `layers.startup.start_engine`, as a member of the gang."""

    def reached(phase: str) -> None:
        log.info("%s: %s", config.model_id, phase)
        progress.report(config.model_id, phase)

    gang.set(gang_link.gang if gang_link else None)
    try:
        await startup.start_engine(engine, config, adapters, reached)
    except EngineStartFailed as error:
        progress.report(config.model_id, progress.FAILED, str(error))
        raise
