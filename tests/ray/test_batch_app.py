"""`penstock batch --app`: a job over the replicas of a running application, one of which is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.ray.zoo import APP, SLOW, Zoo

from penstock.data.job.api import make_worker_pool
from penstock.data.job.job import Job
from penstock.data.job.report import ProgressListener
from penstock.data.job.spec import EngineSpec, JobSpec

pytestmark = pytest.mark.parity("X1", "X5")


@pytest.fixture
def replicas(zoo: Zoo) -> Iterator[dict[str, int]]:
    """Processes by replicas' ids. Afterwards the zoo is whole again."""
    yield zoo.pids()
    zoo.whole()


async def test_the_death_of_a_replica_costs_no_row(zoo: Zoo, replicas: dict[str, int], tmp_path: Path):
    class Killer(ProgressListener):
        def on_tick(self, stats):
            if stats.completed > 40 and len(replicas) == 2:
                zoo.kill(*replicas.popitem())

    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": {n}, "prompt": "row {n}"}}\n' for n in range(200)))
    engines = EngineSpec(app=APP, deployment=f"LLMServer:{SLOW}")
    spec = JobSpec(inputs=(f"{tmp_path}/in.jsonl",), output=f"{tmp_path}/out.jsonl", engines=engines)
    done = await asyncio.wait_for(Job(spec, make_worker_pool(engines, None), listener=Killer()).run(), 120)
    rows = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(replicas) == 1
    assert (done.ok, [row["id"] for row in rows]) == (200, list(range(200)))
    assert all(f"row {row['id']}".startswith(row["generated_text"]) for row in rows)
