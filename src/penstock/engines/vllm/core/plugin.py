"""vLLM calls `register` in every process that it starts (entry point group `vllm.general_plugins`).

In processes of our engines it ties the process to the engine's owner, has it interrupt others for a CPU,
records the reason of a failure where the owner finds it, and slows NIXL's polling on a CPU. Elsewhere it does
nothing. Light: does not import vLLM.
"""

from __future__ import annotations

import os

from penstock import json_logs
from penstock.engines.vllm.core import failure_reason, nixl_progress
from penstock.processes import cpu_turns, lifeline

OWNER = "_PENSTOCK_ENGINE_OWNER"
"""Process id of the owner, in the environment of the core and its workers."""

ENDED_BY_RAY = "0"
"""Stands there for workers that are Ray's actors: on another node the id would be another process's."""


def register() -> None:
    """Idempotent, since vLLM calls it repeatedly. The reason is recorded once vLLM's logging is set up."""
    owner = os.environ.get(OWNER)
    if owner is None or int(owner) == os.getpid():
        return
    cpu_turns.interrupt()
    json_logs.configure()
    if owner != ENDED_BY_RAY:
        lifeline.tie_to(int(owner), failure_reason.forget)
        failure_reason.record()
    if nixl_progress.RESTS in os.environ:
        nixl_progress.rest()
