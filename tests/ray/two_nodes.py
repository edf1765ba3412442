"""Program of test_two_nodes: a gateway on one Ray node, the model on another, which is then lost.

Two raylets on this machine are two nodes to Ray and to us: the gateway must use the network, not the
Unix socket. Prints one line of JSON.
"""

import json
import os
import time

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
# Ray declares a silent node dead after 15 s; here after 2, so that the test is over sooner.
os.environ.update(RAY_health_check_period_ms="500", RAY_health_check_failure_threshold="4")

import ray
from openai import OpenAI
from ray import serve
from ray.cluster_utils import Cluster

from penstock.serve import LLMConfig, LLMRouter, LLMServer

PORT = int(os.environ["PORT"])


def ask() -> str:
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="any", max_retries=0, timeout=60)
    answer = client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "over there"}])
    return answer.choices[0].message.content


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"front": 1}})
    back = cluster.add_node(num_cpus=2, resources={"back": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    # One proxy: those of two nodes on one machine would share the port.
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        deployment_config={"ray_actor_options": {"resources": {"back": 0.1}}},
    )
    router = LLMRouter.as_deployment({"ray_actor_options": {"num_cpus": 0, "resources": {"front": 0.1}}})
    serve.run(router.bind([LLMServer.as_deployment().bind(config)]))
    before = ask()

    cluster.add_node(num_cpus=2, resources={"back": 1})  # where the model can go
    cluster.remove_node(back, allow_graceful=False)
    lost = time.monotonic()
    after = ask()  # waits for the new replica
    print(json.dumps({"before": before, "after": after, "seconds": time.monotonic() - lost}), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


main()
