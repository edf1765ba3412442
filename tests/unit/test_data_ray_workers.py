"""The driver's end of an actor, before there is one."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.config import LLMConfig
from penstock.data.execution.retry import RetryPolicy
from penstock.data.job import ray_workers
from penstock.data.job.protocol import WorkerLost
from penstock.data.job.ray_workers import RayActorPool
from penstock.data.storage.paths import storage_path


async def test_an_actor_that_cannot_be_made_leaves_no_placement_group(tmp_path, monkeypatch, patched):
    removed = Mock()
    made = Mock()
    made.options.return_value.remote.side_effect = ValueError("No such resource.")
    patched(ray_workers, "placement_group", Mock(return_value="group"))
    monkeypatch.setattr(ray_workers, "PlacementGroupSchedulingStrategy", Mock())
    patched(ray_workers, "remove_placement_group", removed)
    patched(ray_workers.ray, "remote", Mock(return_value=made))
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        placement_group_config={"bundles": [{"CPU": 1}], "strategy": "PACK"},
    )
    worker = RayActorPool(config, 1).make_worker(storage_path(tmp_path), "0001-engine-1", RetryPolicy())
    with pytest.raises(ValueError, match="No such resource"):
        await worker.start(Mock())
    removed.assert_called_once_with("group")


async def test_a_worker_that_is_silent_for_minutes_is_lost(tmp_path, monkeypatch):
    """Its process may have been stopped, or its loop blocked: Ray would wait for it without end."""
    monkeypatch.setattr(ray_workers, "_MOST_SILENCE_S", 0.05)
    pool = RayActorPool(LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim"), 1)
    worker: Any = pool.make_worker(storage_path(tmp_path), "0001-engine-1", RetryPolicy())
    worker._actor = Mock()
    worker._actor.step.remote.return_value = asyncio.get_running_loop().create_future()
    with pytest.raises(WorkerLost, match="0001-engine-1 has been silent"):
        await asyncio.wait_for(worker.step([], False), 10)
