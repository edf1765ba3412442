"""Program of test_one_model_two_nodes: a model whose two workers are on two Ray nodes; one of them is killed.

Takes a list of questions, prints one line of JSON.
"""

import json
import os
import signal
import sys
import time

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", HF_HUB_OFFLINE="1")

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from penstock.serve import LLMConfig, LLMServer

LIMIT_S = 200
CONFIG = LLMConfig(
    model_loading_config={"model_id": "penstock-demo"},
    accelerator_config={"kind": "cpu"},
    placement_group_config={"bundle_per_worker": {"CPU": 1, "worker": 1}, "strategy": "STRICT_SPREAD"},
    engine_kwargs={
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "spread_executor.CPUExecutor",
        "max_model_len": 512,
    },
)


class Tattler(LLMServer):
    """A server that tells on which nodes its bundles are."""

    async def bundles(self) -> list[str]:
        group = ray.util.get_current_placement_group()
        return list(placement_group_table(group)["bundles_to_node_id"].values()) if group else []


def workers() -> dict[int, str]:
    """The Ray node of each worker, by its process id."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::CPUWorker"):
                words = [word for parent in process.parents()[:1] for word in parent.cmdline()]
                nodes = [word.partition("=")[2] for word in words if word.startswith("--node_id=")]
                if nodes:  # else it is about to end
                    found[process.pid] = nodes[0]
        except psutil.Error:
            continue
    return found


def ask(handle, questions: list[str]) -> list[str]:
    asked = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    answers = [list(handle.options(stream=True).chat.remote(one | {"temperature": 0})) for one in asked]
    return [answer.choices[0].message.content for (answer,) in answers]


def ask_again(handle, questions: list[str], deadline: float) -> list[str]:
    """A call by handle may reach the dying replica."""
    while True:
        try:
            return ask(handle, questions)
        except RayError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main() -> None:
    questions = json.loads(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "resources": {"worker": 1}})
    cluster.add_node(num_cpus=4, resources={"worker": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    app = Tattler.as_deployment().bind(CONFIG)
    handle = serve.run(app, route_prefix=None)
    before = workers()
    seen = {"bundles": handle.bundles.remote().result(), "workers": list(before.values())}
    seen["answers"] = ask(handle, questions)

    os.kill(next(iter(before)), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while len(after := workers()) < 2 or after.keys() & before.keys():
        assert time.monotonic() < deadline, f"no new workers: {after}"
        time.sleep(0.1)
    seen["after"] = ask_again(handle, questions, deadline)
    print(json.dumps(seen), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


main()
