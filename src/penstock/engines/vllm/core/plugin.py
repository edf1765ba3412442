"""vLLM calls `register` in every process that it starts (entry point group `vllm.general_plugins`).

In processes of our engines it ties the process to the engine's owner, has it interrupt others for a CPU,
records the reason of a failure where the owner finds it, and slows NIXL's polling on a CPU. In any process of
vLLM it asks for the CPU's tile registers. Light: does not import vLLM.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from typing import Any

from penstock import json_logs
from penstock.engines.vllm.core import failure_reason
from penstock.processes import cpu_turns, lifeline

log = logging.getLogger(__name__)

OWNER = "_PENSTOCK_ENGINE_OWNER"
"""Process id of the owner, in the environment of the core and its workers."""

ENDED_BY_RAY = "0"
"""Stands there for workers that are Ray's actors: on another node the id would be another process's."""

NIXL_RESTS = "_PENSTOCK_NIXL_RESTS"
"""Set in the environment of an engine whose progress thread should sleep between polls."""

_DELAY_US = 100  # 4 % of a core; 1,000 costs as much


def register() -> None:
    """Idempotent, since vLLM calls it repeatedly. The reason is recorded once vLLM's logging is set up."""
    _ask_for_tiles()
    owner = os.environ.get(OWNER)
    if owner is None or int(owner) == os.getpid():
        return
    cpu_turns.interrupt()
    json_logs.configure()
    if owner != ENDED_BY_RAY:
        lifeline.tie_to(int(owner), failure_reason.forget)
        failure_reason.record()
    if NIXL_RESTS in os.environ:
        _rest_nixl()


def _ask_for_tiles() -> None:
    """Asks Linux for the tile registers of AMX, which a process may use only once it has asked.

    vLLM 0.32's attention in bfloat16 uses them where the CPU has them, and an engine whose matrix products
    have not asked before dies of an illegal instruction. Where Linux refuses, nothing changes. Remove when
    vLLM asks. arch_prctl(2): ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(158, 0x1023, 18)


def _rest_nixl() -> None:
    """Makes NIXL's progress thread sleep between polls. Call it before vLLM creates NIXL's agent. Idempotent.

    By default it polls without a pause, which is right where cores are many. On a CPU it takes a core away
    from the model: prompts took twice as long. The delay is an option of NIXL that its Python package sets to
    0. Work-around for the Python package of NIXL 1.5. Remove when `nixl_agent_config` takes the delay.
    """
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
