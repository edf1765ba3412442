"""More than one node: replicas are reached by network; a lost node costs neither requests nor rows.

A cluster of its own, for the shared one has one node.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.parity("D4", "X1")]


def test_replicas_on_other_nodes_are_reached_and_the_loss_of_a_node_survived(free_port):
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
    assert seen["rows"] == [[n, f"row {n}", None] for n in range(200)]
