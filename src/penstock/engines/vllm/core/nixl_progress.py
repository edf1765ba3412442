"""Makes NIXL's progress thread sleep between polls. Light: every process of vLLM imports it.

By default it polls without a pause, which is right where cores are many. On a CPU it takes a core away from
the model: prompts took twice as long. The delay is an option of NIXL that its Python package sets to 0.

Work-around for the Python package of NIXL 1.5. Remove when `nixl_agent_config` takes the delay.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

log = logging.getLogger(__name__)

RESTS = "_PENSTOCK_NIXL_RESTS"
"""Set in the environment of an engine whose progress thread should sleep between polls."""

_DELAY_US = 100  # 4 % of a core; 1,000 costs as much


def rest() -> None:
    """Call it before vLLM creates NIXL's agent. Idempotent."""
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
