"""vLLM calls `register` in every process that it starts (entry point group `vllm.general_plugins`).

In processes that belong to one of our engines it ties the process to the engine's owner, leaves the reason of
a failure where the owner finds it, and lets NIXL rest on a CPU. In all others it does nothing. Light: vLLM is
not imported here.
"""

from __future__ import annotations

import os

from penstock import lifeline
from penstock.engines.vllm.core import failure_reason, nixl_progress

OWNER = "_PENSTOCK_ENGINE_OWNER"
"""Process id of the owner, in the environment of the core and its workers."""


def register() -> None:
    """Safe to call again: vLLM does, and its log must have been set up for the reason to be recorded."""
    owner = os.environ.get(OWNER)
    if owner is None:
        return
    lifeline.tie_to(int(owner), failure_reason.forget)
    failure_reason.record()
    if nixl_progress.RESTS in os.environ:
        nixl_progress.rest()
