"""How many replicas a model needs, by what its engines feel. Serve's controller calls `policy`.

Serve's own policy counts requests that pass through Serve; ours go past it, and a long prompt is not a short
one. Limits, factors and delays of the `autoscaling_config` are applied by Serve to what is said here.
Ground level: imports nothing, since the controller has to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

RUNNING, WAITING, WAITING_TOKENS, KV_USAGE = "running", "waiting", "waiting_tokens", "kv_usage"

TARGET_ONGOING_REQUESTS = 32.0
"""For each replica, where the config gives none: enough to use an engine well, too few to slow it down."""

_MOST_WAITING_TOKENS = 8192.0  # of prompts: a second or so of prefill before the next first token
_MOST_KV_USAGE = 0.9  # above it, requests are preempted soon


def policy(ctx: Any) -> tuple[float, dict[str, Any]]:
    """How many would feel well, by Serve's `AutoscalingContext`. Without news: as many as now."""
    ready = ctx.running_replicas
    felt = {name: _latest(ctx.raw_metrics or {}, name, ready) for name in (RUNNING, WAITING)}
    if not felt[RUNNING]:
        return ctx.target_num_replicas, {}
    sums = {name: sum(values) for name, values in felt.items()}
    sums |= {name: sum(_latest(ctx.raw_metrics, name, ready)) for name in (WAITING_TOKENS, KV_USAGE)}
    wanted = needed(sums, ctx.config.target_ongoing_requests, len(felt[RUNNING]))
    if len(felt[RUNNING]) < len(ready):  # some have not spoken yet: none is too many for sure
        wanted = max(wanted, ctx.target_num_replicas)
    return wanted, {}


def needed(sums: Mapping[str, float], target: float, replicas: int) -> int:
    """How many replicas the load of `replicas` needs. Units: requests, tokens, shares of KV caches.

    Where requests wait, these have all that they can run: more are needed in proportion.
    """
    ongoing = sums[RUNNING] + sums[WAITING]
    shares = [
        ongoing / target,
        sums[WAITING_TOKENS] / _MOST_WAITING_TOKENS,
        sums[KV_USAGE] / _MOST_KV_USAGE,
    ]
    if sums[WAITING] and sums[RUNNING]:
        shares.append(replicas * ongoing / sums[RUNNING])
    return math.ceil(max(shares))


def _latest(metrics: Mapping[str, Any], name: str, replicas: Any) -> list[float]:
    """What each replica said last; those that have said nothing are left out."""
    found = metrics.get(name) or {}
    return [found[replica][-1].value for replica in replicas if found.get(replica)]
