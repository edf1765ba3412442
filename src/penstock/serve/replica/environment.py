"""What the replica's process adds to its own environment before it starts an engine, which inherits it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock import sources
from penstock.config.messages.redact import parted

if TYPE_CHECKING:
    from penstock.config import LLMConfig


def enter(config: LLMConfig) -> None:
    """Secrets, which come with the config because anyone may read Serve's options; today's fast downloads."""
    _, secrets = parted((config.runtime_env or {}).get("env_vars", {}))
    os.environ.update(secrets)
    sources.use_fast_transfers()
