"""Program of test_kuberay_deploys: the pods of a manifest as Ray nodes, its serveConfigV2 deployed on them.

As KubeRay does it: the head first, then the config, then the workers, each with its own `rayStartParams`.
GPUs are only claimed, and engines are simulators, but placement is as it would be. Prints one line of JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import ray
import yaml
from openai import OpenAI
from ray import serve
from ray.cluster_utils import Cluster

PORT = int(os.environ["PORT"])
BASE = f"http://127.0.0.1:{PORT}"
KEY = "key-of-the-secret"


def main(manifest: Path) -> None:
    service = next(each for each in yaml.safe_load_all(manifest.read_text()) if each["kind"] == "RayService")
    spec = service["spec"]["rayClusterConfig"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for application in config["applications"]:
        application["args"]["gateway"]["port"] = PORT
    os.environ.update(environment(spec["headGroupSpec"]))
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **resources(spec["headGroupSpec"]),
            "include_dashboard": True,
            "dashboard_port": int(os.environ["DASHBOARD_PORT"]),  # others run on this machine
        },
    )
    ray.init(address=cluster.address, log_to_driver=False)
    deploy(f"http://{cluster.webui_url}", config)
    for group in spec["workerGroupSpecs"]:
        for _ in range(group["replicas"]):
            cluster.add_node(**resources(group))
    status = wait_until_over()
    print(json.dumps({"status": status, "answers": answers(config), "gateways": gateways()}))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def environment(group: dict[str, Any]) -> dict[str, str]:
    """Of its container: values as they are, something for each required entry of the Secret."""
    (container,) = group["template"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    secrets = {
        each["name"]: each["valueFrom"]["secretKeyRef"] for each in container["env"] if "value" not in each
    }
    folder = tempfile.mkdtemp()
    values |= {name: f"{folder}/{name}" for name, text in values.items() if text.startswith("/data/")}
    return values | {name: KEY for name, key in secrets.items() if not key.get("optional")}


def resources(group: dict[str, Any]) -> dict[str, Any]:
    """What Ray counts on its node."""
    start = group["rayStartParams"]
    custom = json.loads(json.loads(start["resources"])) if "resources" in start else {}
    return {"num_cpus": int(start["num-cpus"]), "num_gpus": int(start["num-gpus"]), "resources": custom}


def deploy(dashboard: str, config: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = [str(Path(sys.executable).with_name("serve")), "deploy", "-a", dashboard, file.name]
        subprocess.run(command, check=True, stdout=sys.stderr)


def wait_until_over(limit_s: float = 240) -> str:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        found = serve.status().applications.get("penstock")
        if found is not None and found.status in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY"):
            break
        time.sleep(0.5)
    return f"{found.status.value}: {found.message}" if found is not None else "missing"


def answers(config: dict[str, Any]) -> dict[str, str | None]:
    """One of each model, with the key of the Secret."""
    client = OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=60)
    models = [
        each["model_loading_config"]["model_id"] for each in config["applications"][0]["args"]["llm_configs"]
    ]
    return {
        model: client.completions.create(model=model, prompt="over there").choices[0].text for model in models
    }


def gateways() -> list[Any]:
    """How many run, and what KubeRay's probe gets."""
    with urllib.request.urlopen(f"{BASE}/-/healthz") as answer:
        probe = answer.read().decode()
    states = serve.status().applications["penstock"].deployments["LLMRouter"].replica_states
    return [states.get("RUNNING", 0), probe]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
