"""A cluster that claims two L4 GPUs: what replicas hold that our options place there.

test_placement.py runs it, with the file to write to.
"""

import json
import os
import sys
from pathlib import Path

import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from penstock.config import LLMConfig

TWO = {"tensor_parallel_size": 2}
CASES = {
    "one_node": {"accelerator_type": "L4", "engine_kwargs": TWO},
    "ray_executor": {
        "accelerator_type": "L4",
        "engine_kwargs": {**TWO, "distributed_executor_backend": "ray"},
    },
    "half": {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5, "CPU": 1}}},
    "cpu": {"accelerator_config": {"kind": "cpu"}, "engine_kwargs": TWO},
}


class Probe:
    def __call__(self):
        group = ray.util.get_current_placement_group()
        held = ray.get_runtime_context().get_assigned_resources()
        return {
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "gpus": held.get("GPU", 0),
            "bundles": list(placement_group_table(group)["bundles"].values()) if group else [],
        }


def main():
    ray.init(
        num_cpus=8,
        num_gpus=2,
        resources={"accelerator_type:L4": 1},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    serve.start(proxy_location="Disabled")
    nodes = [node["Resources"] for node in ray.nodes()]
    seen = {}
    for name, values in CASES.items():
        config = LLMConfig(model_loading_config={"model_id": name}, **values)
        deployment = serve.deployment(Probe).options(**config.get_serve_options(nodes=nodes))
        seen[name] = serve.run(deployment.bind(), name=name, route_prefix=None).remote().result(timeout_s=60)
        serve.delete(name)
    Path(sys.argv[1]).write_text(json.dumps(seen))
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
