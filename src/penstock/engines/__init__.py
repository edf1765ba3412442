"""One adapter per engine behind the Engine protocol, and the table that finds them.

An adapter is imported when a config asks for it, so a process that serves nothing never pays for an engine's
imports.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.engine import Engine

_CLASSES = {
    "process": "penstock.engines.process.engine:ProcessEngine",
    "sim": "penstock.engines.sim.engine:SimEngine",
    "sglang": "penstock.engines.sglang.engine:SGLangEngine",
    "vllm": "penstock.engines.vllm.engine:VLLMEngine",
}


def engine_class(config: LLMConfig) -> type[Engine]:
    """The class that runs `config`, imported now; PENSTOCK_ENGINE_CLS (`module:Class`) names another one.

    Raises: ConfigError when that cannot be imported.
    """
    # Not above: engines' own processes import this package, too.
    from penstock.config.schema.settings import Settings

    override = Settings.read().engine_cls
    if override is None:
        return resolve_name(_CLASSES[config.engine_name])
    try:
        return resolve_name(override)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"PENSTOCK_ENGINE_CLS={override!r} cannot be imported ({error}); write it as module:Class."
        ) from error
