"""What a replica takes from the Ray cluster, and what it adds to its own process's environment."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray import serve

from penstock import json_logs, sources
from penstock.config import LLMConfig
from penstock.config.messages.redact import parted
from penstock.engine import HOST
from penstock.processes import cpu_turns, lifeline


def nodes() -> list[dict[str, float]] | None:
    """Resources of every living node; None while this process is not connected to Ray."""
    if not ray.is_initialized():
        return None
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def runtime_env() -> dict[str, Any]:
    """This job's runtime environment, the base of every replica's; empty without Ray."""
    return dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}


def in_replica() -> bool:
    """Whether this process is a replica of Serve."""
    try:
        serve.get_replica_context()
    except Exception:  # Serve raises its own error outside a replica
        return False
    return True


def prepare(config: LLMConfig) -> None:
    """Ties a replica to its raylet, has it wait for its engine, and sets what that one's processes inherit.

    Called in the thread of the replica's event loop.
    """
    cpu_turns.wait()
    lifeline.tie_to(os.getppid())  # a killed raylet leaves its workers running
    # Without it, an engine whose workers are Ray actors would start a cluster of its own.
    os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    os.environ[HOST] = ray.util.get_node_ip_address()
    enter(config)


def enter(config: LLMConfig) -> None:
    """Sets secret variables, which come with the config because Serve shows a deployment's options, and the
    form of the log.
    """
    _, secrets = parted((config.runtime_env or {}).get("env_vars", {}))
    os.environ.update(secrets)
    json_logs.configure()
    sources.use_fast_transfers()
