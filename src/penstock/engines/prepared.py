"""Prepares a node for a model before its engine starts: the user's callbacks, and the files.

Every engine starts with it; those that read weights have them fetched.
"""

from __future__ import annotations

import asyncio
import time
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import sources
from penstock.engines import callback, weights
from penstock.errors import DownloadFailed, EngineStartFailed, SourceNotFound

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.engine import Progress

PHASE = "download"
_REPORT_S = 5.0


async def prepared(config: LLMConfig, progress: Progress, *, fetch: bool = True) -> LLMConfig:
    """The config with folders on this node; at once when there is nothing to do.

    Raises: EngineStartFailed with what could not be fetched, which file is broken, or which callback failed,
    and why.
    """
    steps = callback.made(config)
    await callback.call(steps, config, callback.BEFORE_INIT)
    config = callback.moved(steps, config)
    if fetch and (steps is None or steps.ctx.run_init_node) and not sources.is_here(config):
        await callback.call(steps, config, callback.BEFORE_DOWNLOAD)
        config = callback.moved(steps, config)
        files = steps.ctx.model_files if steps else None
        config = await _fetched(config, files or sources.model_files, progress)
    await callback.call(steps, config, callback.AFTER_INIT)
    if fetch:
        await asyncio.to_thread(_check, config)
    return config


def _check(config: LLMConfig) -> None:
    folder = Path(expanduser(config.model_source))
    if config.engine_kwargs.get("load_format") == "dummy" or not folder.exists():
        return
    try:
        weights.check(folder)
    except weights.Broken as error:
        raise EngineStartFailed(f"Model '{config.model_id}' in {folder} cannot start: {error}.") from error


async def _fetched(config: LLMConfig, files: sources.Only, progress: Progress) -> LLMConfig:
    progress(PHASE)
    loop, due, given_up = asyncio.get_running_loop(), time.monotonic() + _REPORT_S, False

    def watch(done: int, total: int) -> None:
        """Reports bytes now and then, from the download's threads; ends them when nobody waits."""
        nonlocal due
        if given_up:
            raise DownloadFailed("The download was given up, as the start was.")
        if time.monotonic() > due:
            due = time.monotonic() + _REPORT_S
            phase = f"{PHASE} ({done / 1e9:.1f} of {total / 1e9:.1f} GB)"
            loop.call_soon_threadsafe(progress, phase)

    try:
        return await asyncio.to_thread(sources.with_local_sources, config, files, watch)
    except (SourceNotFound, DownloadFailed) as error:
        raise EngineStartFailed(f"Model '{config.model_id}' cannot start: {error}") from error
    finally:
        given_up = True
