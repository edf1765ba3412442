"""NIXL's progress thread, made to rest between two looks for work. Light: every process of vLLM imports it.

NIXL has it look without a pause, which is right where cores are many. On a CPU it takes a core away from the
model: prompts took twice as long. Its delay is an option of NIXL that its Python part sets to 0.

Work-around for the Python package of NIXL 1.5. Remove when `nixl_agent_config` takes the delay.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

log = logging.getLogger(__name__)

RESTS = "_PENSTOCK_NIXL_RESTS"
"""Set in the environment of an engine whose thread shall rest."""

_DELAY_US = 100  # 4 % of a core; as much as 1,000


def rest() -> None:
    """Call it before vLLM makes NIXL's agent. Safe to call again."""
    from nixl._api import nixl_agent

    bindings = getattr(sys.modules[nixl_agent.__module__], "nixlBind", None)
    config = getattr(bindings, "nixlAgentConfig", None)
    if bindings is None or not hasattr(config, "pthrDelay"):
        log.warning("This version of NIXL has no pthrDelay: its progress thread takes a core.")
    elif config.__module__ != __name__:
        bindings.nixlAgentConfig = _resting(config)


def _resting(base: Any) -> Any:
    class Resting(base):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _DELAY_US if name == "pthrDelay" else value)

    return Resting
