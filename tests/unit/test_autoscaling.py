"""How many replicas a load needs, on Serve's own context."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from penstock.autoscaling import needed, policy

pytestmark = pytest.mark.parity("S19", "X10")

IDLE = {"running": 0, "waiting": 0, "waiting_tokens": 0, "kv_usage": 0.0}


class Value:
    def __init__(self, value: float) -> None:
        self.value = value


def context(*replicas: dict[str, float] | None, target: int | None = None) -> AutoscalingContext:
    """Of replicas that said this last; None for one that has said nothing yet."""
    ids = [f"r{number}" for number, _ in enumerate(replicas)]
    said: dict[str, dict[Any, Any]] = {name: {} for name in IDLE}
    for replica_id, load in zip(ids, replicas, strict=True):
        for name, value in (load or {}).items():
            said[name][replica_id] = [Value(99.0), Value(value)]
    return AutoscalingContext(
        deployment_id=None,  # type: ignore[arg-type]
        deployment_name="m",
        app_name="a",
        current_num_replicas=len(ids),
        target_num_replicas=len(ids) if target is None else target,
        running_replicas=ids,  # type: ignore[arg-type]
        total_num_requests=0.0,
        total_queued_requests=0.0,
        aggregated_metrics={},
        raw_metrics=said,  # type: ignore[arg-type]
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=9,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=AutoscalingConfig(max_replicas=9, target_ongoing_requests=10),
    )


@pytest.mark.parametrize(
    ("load", "replicas"),
    [
        ({}, 0),
        ({"running": 1}, 1),
        ({"running": 10}, 1),
        ({"running": 11}, 2),
        ({"running": 3, "waiting_tokens": 20_000}, 3),
        ({"running": 3, "kv_usage": 0.95}, 2),
        ({"running": 4, "waiting": 4}, 2),
        ({"running": 4, "waiting": 5}, 3),
    ],
)
def test_one_replica_needs_as_many_as_its_worst_feeling_says(load: dict[str, float], replicas: int):
    assert needed(IDLE | load, target=10, replicas=1) == replicas
    assert policy(context(IDLE | load)) == (replicas, {})


def test_loads_of_all_replicas_count_together():
    assert policy(context(IDLE | {"running": 14}, IDLE | {"running": 5}))[0] == 2
    assert policy(context(IDLE | {"running": 14}, IDLE | {"running": 7}))[0] == 3


def test_without_news_nothing_changes():
    assert policy(context())[0] == 0
    assert policy(context(target=1))[0] == 1
    assert policy(context(None, None))[0] == 2


def test_while_one_has_not_spoken_none_is_taken_away():
    assert policy(context(IDLE, None))[0] == 2
    assert policy(context(IDLE | {"running": 45}, None))[0] == 5
