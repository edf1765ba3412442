"""More than one node: the gateway reaches a replica by network, and the loss of its node is survived."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_replica_on_another_node_is_reached_and_its_loss_survived(free_port):
    program = Path(__file__).with_name("two_nodes.py")
    environment = {**os.environ, "PORT": str(free_port)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(said)
    assert seen["before"] == seen["after"] != ""
