"""Penstock's gateway beside LiteLLM's proxy, before the same simulated replica, which answers at once:

    python -m benchmarks.litellm_proxy FOLDER/bin/litellm

LiteLLM has an environment of its own, one worker, and a master key: its virtual keys need Postgres and
engines of Prisma. The gateway has a tenant's key with limits, usage and a price. The replica is asked
straight, through each of the two, and again; CPU is that of the proxy's process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median

from benchmarks.fleet import Child, Gateway, Replica
from benchmarks.gateway import _AT_ONCE
from benchmarks.table import markdown
from benchmarks.trial import Question, Trial, run
from benchmarks.workload import MODEL_ID
from penstock.config.schema.tenants import hashed

KEY = "fake-key"  # that the load generator sends
LIMITS = {"requests_per_minute": 10**7, "tokens_per_minute": 10**9, "cost_per_month": 1e6}
LOADS = (
    ("one client", False, 1, 0.0),
    ("16 clients", False, 16, 0.0),
    ("20 requests/s", False, 8, 0.4),
    ("16 streams", True, 16, 0.0),
)
_START_S = 240.0


class LiteLLM(Child):
    """The proxy, when it answers."""

    headers = ()

    def __init__(self, command: str, replica: Replica, port: int) -> None:
        secret = replica.headers[0].partition(": ")[2]
        to = {
            "model": f"openai/{MODEL_ID}",
            "api_base": f"http://127.0.0.1:{replica.port}/v1",
            "api_key": "-",
        }
        models = [
            {"model_name": MODEL_ID, "litellm_params": to | {"extra_headers": {"x-penstock-secret": secret}}}
        ]
        config = Path(tempfile.mkdtemp()) / "config.yaml"
        config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": KEY}}))
        words = [command, "--config", str(config), "--port", str(port), "--num_workers", "1"]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        self._process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
        self.pid, self.port = self._process.pid, port
        until = time.monotonic() + _START_S
        while not self._answers():
            if time.monotonic() > until:
                raise RuntimeError("LiteLLM does not answer; its last words are above.")
            time.sleep(0.5)

    port = 0

    def _answers(self) -> bool:
        content = json.dumps(Question().body()).encode()
        fields = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, content, fields), timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False


class Keyed(Gateway):
    """The gateway with a tenant."""

    headers = LiteLLM.headers

    def __init__(self, replica: Replica) -> None:
        key = {"tenant": "t", "name": "k", "hash": hashed(KEY), "limits": LIMITS}
        prices = {MODEL_ID: {"input": 1, "output": 2}}
        super().__init__(replica, keys=[key], tenants={"t": {"limits": LIMITS}}, prices=prices)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("litellm", help="the command")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    options = parser.parse_args()
    lines = list[tuple[str, ...]]()
    with (
        Replica("sim", **_AT_ONCE) as replica,
        Keyed(replica) as gateway,
        LiteLLM(options.litellm, replica, 8124) as litellm,
    ):
        for name, stream, streams, every in LOADS:
            found: dict[str, list[Trial]] = {}
            for _ in range(options.rounds):
                for target in (replica, gateway, litellm):
                    load = {"streams": streams, "every": every, "seconds": options.seconds}
                    trial = run(name, target, [target], Question(stream=stream, tokens=20), **load)
                    found.setdefault(type(target).__name__, []).append(trial)
            for through, trials in found.items():
                figures = (
                    median(one.ms("p50") for one in trials),
                    median(one.ms("p99") for one in trials),
                    median(one.requests_per_s for one in trials),
                    1e6 / median(one.cpu_us(0, "requests_all") for one in trials),
                )
                failed = str(sum(one.failed for one in trials))
                lines.append((name, through, *(f"{one:,.1f}" for one in figures), failed))
                print(*lines[-1], sep="\t", flush=True)
    head = ("load", "through", "p50 ms", "p99 ms", "requests/s", "requests/s a core", "failed")
    print(markdown(head, lines))


if __name__ == "__main__":
    main()
