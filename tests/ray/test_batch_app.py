"""`penstock batch --app`: a job over the replicas of a running application, one of which is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from ray import serve

from penstock.config import LLMConfig
from penstock.data.hire import hire
from penstock.data.job import Job
from penstock.data.order import Engines, Order
from penstock.data.watcher import Watcher
from penstock.serve import build_openai_app

pytestmark = pytest.mark.parity("X1", "X5")


@pytest.fixture
def app(serve_url: str):
    """Two simulated replicas of the application `mortals`."""
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        llm_engine="sim",
        engine_kwargs={"step_base_ms": 30, "max_num_seqs": 4},
        deployment_config={"num_replicas": 2},
    )
    serve.run(build_openai_app({"llm_configs": [config]}), name="mortals", route_prefix="/mortals")
    yield "mortals"
    serve.delete("mortals")


async def test_the_death_of_a_replica_costs_no_row(app: str, tmp_path: Path):
    class Killer(Watcher):
        killed = 0

        def look(self, tally):
            if tally.ended > 40 and not self.killed:
                self.killed = _replica()
                os.kill(self.killed, signal.SIGKILL)

    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "row {n}"}}\n' for n in range(200)))
    engines = Engines(app=app)
    order = Order(inputs=(f"{tmp_path}/in.jsonl",), output=f"{tmp_path}/out.jsonl", engines=engines)
    watcher = Killer()
    done = await asyncio.wait_for(Job(order, hire(engines, None), watcher=watcher).run(), 120)
    rows = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert watcher.killed
    assert (done.ok, [row["id"] for row in rows]) == (200, list(range(200)))
    assert all(f"row {row['id']}".startswith(row["generated_text"]) for row in rows)


def _replica() -> int:
    for process in psutil.process_iter(["cmdline"]):  # others may be gone when they are asked
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith("ray::ServeReplica:mortals:") and "Router" not in title:
            return process.pid
    raise AssertionError("there is no replica to kill")
