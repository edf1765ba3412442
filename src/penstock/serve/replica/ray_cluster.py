"""What the Ray cluster says, where there is one: its nodes' resources and this job's runtime environment."""

from __future__ import annotations

from typing import Any

import ray


def nodes() -> list[dict[str, float]] | None:
    """Resources of every living node; None while this process is not connected to Ray."""
    if not ray.is_initialized():
        return None
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def runtime_env() -> dict[str, Any]:
    """This job's runtime environment, the base of every replica's; empty without Ray."""
    return dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
