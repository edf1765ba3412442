"""One adapter per engine behind the Engine protocol, and the table that finds them.

An adapter is imported when a config asks for it, so a process that serves nothing never pays for an engine's
imports.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.engine import Engine

OVERRIDE = "PENSTOCK_ENGINE_CLS"
"""Environment variable that names another engine class as `module:Class`."""

_CLASSES = {
    "sim": "penstock.engines.sim.engine:SimEngine",
    "vllm": "penstock.engines.vllm.engine:VLLMEngine",
}


def engine_class(config: LLMConfig) -> type[Engine]:
    """The class that runs `config`, imported now.

    Raises: ConfigError when the class that PENSTOCK_ENGINE_CLS names cannot be imported.
    """
    override = os.environ.get(OVERRIDE)
    if not override:
        return _load(_CLASSES[config.engine_name])
    try:
        return _load(override)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{OVERRIDE}={override!r} names no class that can be imported; write it as module:Class."
        ) from error


def _load(path: str) -> type[Engine]:
    module, name = path.split(":")
    return getattr(import_module(module), name)
