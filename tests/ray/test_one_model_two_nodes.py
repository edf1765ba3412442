"""One engine over two nodes: vLLM's workers are Ray actors, each in its bundle of the replica's group.

A cluster of its own, for the shared one has one node. The second node is as on another machine: it sees no
process of the first one, and an empty folder where that has its cache of models.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import ports
import pytest
from bucket import s3_server
from demo_questions import QUESTIONS, said_by_transformers
from models import model

import penstock
from recipes.adapters.answers import ANSWERS

pytestmark = [pytest.mark.full, pytest.mark.timeout(600), pytest.mark.parity("S7", "S24")]

HERE = Path(__file__).parent
ASKED = list(QUESTIONS)[:3]
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""A process that sees only its children, and mounts that only it sees."""

RAY = str(Path(sys.executable).with_name("ray"))
PLAIN = ["--include-dashboard", "false"]
NODE = ["--num-cpus", "4", "--resources", '{"worker": 1}', "--object-store-memory", "100000000", "--block"]
NODE += ["--min-worker-port", "0", "--max-worker-port", "0"]


@contextmanager
def two_nodes(environment: dict[str, str]) -> Iterator[str]:
    """A cluster, by its address. On the second node the cache that `environment` names is another folder."""
    port = ports.unused()
    hidden = f'mount -t tmpfs none {environment["PENSTOCK_CACHE"]} && exec "$@"'
    with tempfile.TemporaryDirectory() as short, ExitStack() as nodes:  # Ray's sockets allow no long path

        def start(*words: str, end: int = signal.SIGTERM) -> subprocess.Popen[bytes]:
            node = nodes.enter_context(subprocess.Popen([*words, *NODE], env=environment))
            nodes.callback(node.send_signal, end)
            return node

        head = start(RAY, "start", "--head", "--port", str(port), "--temp-dir", short, *PLAIN)
        while not listens(port):
            assert head.poll() is None
            time.sleep(0.1)
        second = [*APART, "sh", "-c", hidden, "sh", RAY, "start", "--address", f"127.0.0.1:{port}"]
        start(*second, end=signal.SIGKILL)  # unshare waits for its child
        yield f"127.0.0.1:{port}"


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(subprocess.run([*APART, "true"]).returncode != 0, reason="needs root, for namespaces")
def test_two_halves_of_a_model_on_two_nodes_answer_as_the_whole_also_after_one_was_killed(tmp_path: Path):
    """As tensor shards, with an adapter, and as pipeline stages; all files are in a bucket."""
    (tmp_path / "cache").mkdir()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "PENSTOCK_CACHE": str(tmp_path / "cache"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_AUTH_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    with s3_server("models") as s3, two_nodes(environment) as address:
        sources = s3.upload(Path(penstock.demo_model()), "models", "demo"), "s3://models/adapters"
        s3.upload(Path(model("adapters")) / "pirate", "models", "adapters/pirate")
        program = [sys.executable, str(HERE / "one_model_two_nodes.py"), address, *sources, json.dumps(ASKED)]
        done = subprocess.run(
            program, env=environment | s3.environment, capture_output=True, text=True, timeout=500
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    seen = json.loads(said)
    assert len(set(seen["bundles"])) == 2
    assert sorted(seen["workers"]) == sorted(seen["bundles"])
    assert (
        seen["answers"]
        == seen["after"]
        == seen["stages"]
        == [text for text, _ in said_by_transformers(ASKED)]
    )
    assert seen["adapter"] == [ANSWERS["pirate"].get(question, QUESTIONS[question]) for question in ASKED]
