"""How many replicas a model needs, by the load of its engines. Serve's controller calls `policy`.

Serve's own policy counts requests that pass through Serve; Penstock's do not, and prompts differ in length.
Serve applies the limits, factors and delays of the `autoscaling_config` to the result. This module imports
nothing, because the controller imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

RUNNING, WAITING, WAITING_TOKENS, KV_USAGE = "running", "waiting", "waiting_tokens", "kv_usage"

TARGET_ONGOING_REQUESTS = 32.0
"""Default for each replica: enough to use an engine well, too few to slow it down."""

_MOST_WAITING_TOKENS = 8192.0  # about a second of prefill before the next first token
_MOST_KV_USAGE = 0.9  # above it, requests are soon preempted


def policy(ctx: Any) -> tuple[float, dict[str, Any]]:
    """Desired number of replicas, from Serve's `AutoscalingContext`; unchanged until one has reported."""
    ready = ctx.running_replicas
    load = {name: _latest(ctx.raw_metrics or {}, name, ready) for name in (RUNNING, WAITING)}
    if not load[RUNNING]:
        return ctx.target_num_replicas, {}
    sums = {name: sum(values) for name, values in load.items()}
    sums |= {name: sum(_latest(ctx.raw_metrics, name, ready)) for name in (WAITING_TOKENS, KV_USAGE)}
    wanted = needed(sums, ctx.config.target_ongoing_requests, len(load[RUNNING]))
    if len(load[RUNNING]) < len(ready):  # some have not reported yet: do not scale down
        wanted = max(wanted, ctx.target_num_replicas)
    return wanted, {}


def needed(sums: Mapping[str, float], target: float, replicas: int) -> int:
    """How many replicas the load of `replicas` needs. Units: requests, tokens, shares of KV caches.

    If requests wait, the engines run as many as they can: more are needed in proportion.
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
    """The last report of each replica that has reported."""
    found = metrics.get(name) or {}
    return [found[replica][-1].value for replica in replicas if found.get(replica)]
