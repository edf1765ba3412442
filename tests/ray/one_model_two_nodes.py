"""Program of test_one_model_two_nodes: models whose two workers are on two Ray nodes; one of them is killed.

Takes the address of the cluster, the sources of a model and of its adapters, and a list of questions. Prints
one line of JSON.
"""

import json
import os
import signal
import sys
import time

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from spread_executor import CPUExecutor

from penstock.serve import LLMConfig, LLMServer

LIMIT_S = 200
ADDRESS, MODEL, ADAPTERS = sys.argv[1:4]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def config(**engine_kwargs) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "m", "model_source": MODEL},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundle_per_worker": {"CPU": 1, "worker": 1}, "strategy": "STRICT_SPREAD"},
        lora_config={"dynamic_lora_loading_path": ADAPTERS, "max_num_adapters_per_replica": 1},
        runtime_env={"env_vars": ENVIRONMENT},
        engine_kwargs={
            "distributed_executor_backend": CPUExecutor,  # vLLM takes no name where there are stages
            "max_model_len": 512,
            **engine_kwargs,
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
                if nodes and nodes[0] in {node["NodeID"] for node in ray.nodes()}:  # else it is about to end
                    found[process.pid] = nodes[0]
        except psutil.Error:
            continue
    return found


def ask(handle, questions: list[str], model: str = "m") -> list[str]:
    asked = [{"messages": [{"role": "user", "content": question}], "model": model} for question in questions]
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


def main(questions: list[str]) -> None:
    ray.init(address=ADDRESS, log_to_driver=False)
    deadline = time.monotonic() + LIMIT_S
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        assert time.monotonic() < deadline, "the second node has not come"
        time.sleep(0.1)
    serve.start(proxy_location="Disabled")
    handle = serve.run(Tattler.as_deployment().bind(config(tensor_parallel_size=2)), route_prefix=None)
    before = workers()
    seen = {"bundles": handle.bundles.remote().result(), "workers": list(before.values())}
    seen["answers"] = ask(handle, questions)
    seen["adapter"] = ask(handle, questions, "m:pirate")

    os.kill(next(iter(before)), signal.SIGKILL)
    deadline = time.monotonic() + LIMIT_S
    while len(after := workers()) < 2 or after.keys() & before.keys():
        assert time.monotonic() < deadline, f"no new workers: {after}"
        time.sleep(0.1)
    seen["after"] = ask_again(handle, questions, deadline)
    serve.delete("default")

    app = LLMServer.as_deployment().bind(config(pipeline_parallel_size=2))
    seen["stages"] = ask(serve.run(app, route_prefix=None), questions)
    print(json.dumps(seen), flush=True)
    serve.shutdown()


main(json.loads(sys.argv[4]))
