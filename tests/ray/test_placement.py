"""Placement on a real Ray that claims two GPUs: what the replica's actor really holds."""

import os
from typing import Any

import pytest
import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from penstock.config import LLMConfig

pytestmark = pytest.mark.parity("S7")

TWO = {"tensor_parallel_size": 2}
ONE_NODE = {"accelerator_type": "L4", "engine_kwargs": TWO}
RAY_EXECUTOR = {"accelerator_type": "L4", "engine_kwargs": {**TWO, "distributed_executor_backend": "ray"}}
HALF = {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5, "CPU": 1}}}
CPU = {"accelerator_config": {"kind": "cpu"}, "engine_kwargs": TWO}


class Probe:
    def __call__(self) -> dict[str, Any]:
        group = ray.util.get_current_placement_group()
        held = ray.get_runtime_context().get_assigned_resources()
        return {
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "gpus": held.get("GPU", 0),
            "bundles": list(placement_group_table(group)["bundles"].values()) if group else [],
        }


@pytest.fixture
def held(serve_url, monkeypatch):
    """Gives a function: what a replica holds whose config has these fields."""
    monkeypatch.delenv("PENSTOCK_ACCELERATOR")

    def ask(**fields: Any) -> dict[str, Any]:
        nodes = [node["Resources"] for node in ray.nodes()]
        options = LLMConfig(model_loading_config={"model_id": "probe"}, **fields).get_serve_options(
            nodes=nodes
        )
        deployment = serve.deployment(Probe).options(**options)
        return serve.run(deployment.bind(), name="placed", route_prefix=None).remote().result(timeout_s=60)

    yield ask
    serve.delete("placed")


def test_the_actor_holds_all_gpus_of_an_engine_that_fits_one_node(held):
    seen = held(**ONE_NODE)
    assert seen["devices"] == "0,1"
    assert seen["bundles"] == [{"GPU": 2, "CPU": 3, "accelerator_type:L4": 0.001}]


def test_the_ray_executors_workers_have_the_gpus_not_the_actor(held):
    seen = held(**RAY_EXECUTOR)
    assert seen["gpus"] == 0
    assert seen["bundles"] == [
        {"GPU": 1, "CPU": 2, "accelerator_type:L4": 0.001},
        {"GPU": 1, "CPU": 1, "accelerator_type:L4": 0.001},
    ]


def test_half_a_gpu_is_held(held):
    seen = held(**HALF)
    assert seen["gpus"] == 0.5
    assert seen["devices"] in ("0", "1")


def test_on_cpu_no_gpu_is_held_and_nothing_is_grouped(held):
    seen = held(**CPU)
    assert (seen["gpus"], seen["bundles"]) == (0, [])
