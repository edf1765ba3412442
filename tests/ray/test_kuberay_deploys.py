"""The manifests of deploy/kuberay: pods hold what they deploy, in KubeRay's order, and follow the ConfigMap.

A cluster of its own for each, for the shared one has one node and no such GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.ports import unused

FOLDER = Path(__file__).parents[2] / "deploy" / "kuberay"
GATEWAYS = {"one-gpu": 2, "many-models": 4, "several-nodes": 3}

pytestmark = [pytest.mark.full, pytest.mark.parity("S29")]


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_pods_of_a_manifest_hold_what_it_deploys(name: str, free_port: int):
    environment = {**os.environ, "PORT": str(free_port), "DASHBOARD_PORT": str(unused())}
    environment["PENSTOCK_ENGINE_CLS"] = "tests.standin:simulator"
    for inherited in ("RAY_ADDRESS", "PENSTOCK_ACCELERATOR", "PENSTOCK_API_KEY"):
        environment.pop(inherited, None)
    program = Path(__file__).with_name("kuberay_pods.py")
    environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(program), str(FOLDER / f"{name}.yaml")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(said)
    assert seen["status"].startswith("RUNNING")
    assert all("over there" in text for text in seen["answers"].values())
    assert seen["gateways"] == [GATEWAYS[name], "success"]
    assert (seen["edited"], seen["stays"]) == (True, True)
