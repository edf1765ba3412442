"""Program of test_two_nodes: a gateway on one Ray node, the model on another, which is then lost; and a batch
job over replicas on two nodes, of which one is lost.

Two raylets on this machine are two nodes to Ray and to us: the gateway must use the network, not the
Unix socket. Prints one line of JSON.
"""

import asyncio
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
# Ray declares a silent node dead after 15 s; here after 2, so that the test is over sooner.
os.environ.update(RAY_health_check_period_ms="500", RAY_health_check_failure_threshold="4")

import ray
from openai import OpenAI
from ray import serve
from ray.cluster_utils import Cluster

from penstock.data.job.api import make_worker_pool
from penstock.data.job.job import Job
from penstock.data.job.report import ProgressListener
from penstock.data.job.spec import EngineSpec, JobSpec
from penstock.serve import LLMConfig, LLMRouter, LLMServer, build_llm_deployment

PORT = int(os.environ["PORT"])


def ask() -> str:
    client = OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="any", max_retries=0, timeout=60)
    answer = client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "over there"}])
    return answer.choices[0].message.content


def answered_rows(cluster: Cluster, folder: Path) -> list[list]:
    """Rows of a job that loses the second of its two nodes: the number, the answer, the error of each."""
    lost = cluster.add_node(num_cpus=2, resources={"back": 1})
    config = LLMConfig(
        model_loading_config={"model_id": "batch"},
        llm_engine="sim",
        engine_kwargs={"step_base_ms": 30, "max_num_seqs": 4},
        deployment_config={"num_replicas": 2, "ray_actor_options": {"resources": {"back": 0.6}}},
    )
    serve.run(build_llm_deployment(config), name="batch", route_prefix=None)

    class Loser(ProgressListener):
        nodes = 1

        def on_tick(self, stats):
            if stats.completed > 40 and self.nodes:
                self.nodes -= 1
                cluster.remove_node(lost, allow_graceful=False)

    (folder / "in.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "row {n}"}}\n' for n in range(200)))
    engines = EngineSpec(app="batch")
    spec = JobSpec(inputs=(f"{folder}/in.jsonl",), output=f"{folder}/out.jsonl", engines=engines)
    watcher = Loser()
    asyncio.run(Job(spec, make_worker_pool(engines, None), listener=watcher).run())
    assert not watcher.nodes
    rows = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    return [[row["id"], row.get("generated_text"), row.get("error")] for row in rows]


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
    seen = {"before": before, "after": after, "seconds": time.monotonic() - lost}
    with tempfile.TemporaryDirectory() as folder:
        seen["rows"] = answered_rows(cluster, Path(folder))
    print(json.dumps(seen), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


main()
