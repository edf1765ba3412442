"""Program of test_kuberay_deploys: the pods of a manifest as Ray nodes, its serveConfigV2 deployed on them.

As KubeRay does it: the head first, then the config, then the workers, each with its own `rayStartParams`.
GPUs are only claimed, and engines are simulators, but placement is as it would be. Prints one line of JSON.
"""

import contextlib
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
from openai import NotFoundError, OpenAI
from ray import serve
from ray.cluster_utils import Cluster

PORT = int(os.environ["PORT"])
BASE = f"http://127.0.0.1:{PORT}"
KEY = "key-of-the-secret"


def main(manifest: Path) -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all(manifest.read_text())}
    service = documents["RayService"]["spec"]
    spec = service["rayClusterConfig"]
    config = yaml.safe_load(service["serveConfigV2"])
    (application,) = config["applications"]
    application["args"]["gateway"]["port"] = PORT
    file = mounted(documents["ConfigMap"]["data"], application["args"]["file"])
    application["args"]["file"] = str(file)
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
    fleet = yaml.safe_load(file.read_text())
    names = [each["model_loading_config"]["model_id"] for each in fleet["llm_configs"]]
    seen = {"status": status, "answers": answers(names), "gateways": gateways()}
    fleet["llm_configs"][0]["aliases"] = ["edited"]
    file.write_text(yaml.safe_dump(fleet))
    edited, begun = wait_for("edited"), serve.status().applications["penstock"].last_deployed_time_s
    deploy(f"http://{cluster.webui_url}", config)  # as KubeRay does when its operator has restarted
    wait_until_over()
    stays = wait_for("edited") and serve.status().applications["penstock"].last_deployed_time_s == begun
    print(json.dumps({**seen, "edited": edited, "stays": stays}))
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def mounted(files: dict[str, str], path: str) -> Path:
    """The file of the ConfigMap that the head has at this path, somewhere here."""
    folder = Path(tempfile.mkdtemp())
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder / Path(path).name


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
        found = serve.status().applications.get("fleet-file")
        if found is not None and found.status in ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY"):
            break
        time.sleep(0.5)
    return f"{found.status.value}: {found.message}" if found is not None else "missing"


def answers(models: list[str]) -> dict[str, str | None]:
    """One of each model, with the key of the Secret."""
    client = OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=60)
    return {
        model: client.completions.create(model=model, prompt="over there").choices[0].text for model in models
    }


def wait_for(model: str, limit_s: float = 60) -> bool:
    """Whether a gateway comes to know it."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(NotFoundError):
            return bool(answers([model]))
        time.sleep(0.5)
    return False


def gateways() -> list[Any]:
    """How many run, and what KubeRay's probe gets."""
    with urllib.request.urlopen(f"{BASE}/-/healthz") as answer:
        probe = answer.read().decode()
    states = serve.status().applications["penstock"].deployments["LLMRouter"].replica_states
    return [states.get("RUNNING", 0), probe]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
