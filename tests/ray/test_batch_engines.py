"""Batch over engines of its own, in Ray actors: all at once, each to be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from ray.exceptions import OutOfMemoryError, RuntimeEnvSetupError, WorkerCrashedError
from tests.cluster import Cluster
from tests.kubernetes import SERVICE_VARIABLES
from tests.ray.command import OF_NO_USE, Command

from penstock.config import LLMConfig
from penstock.data.job.job import Job
from penstock.data.job.protocol import WorkerLost
from penstock.data.job.ray_workers import RayActorPool, _translate
from penstock.data.job.report import ProgressListener
from penstock.data.job.spec import JobSpec
from penstock.errors import EngineStartFailed, Unavailable

pytestmark = pytest.mark.parity("X5", "D13")


class Seen(ProgressListener):
    """Processes of the engines, and what was said."""

    def __init__(self) -> None:
        self.pids: dict[str, list[int]] = {}
        self.sentences: list[str] = []

    def on_phase(self, worker, phase):
        if phase.startswith("process "):
            self.pids.setdefault(worker, []).append(int(phase.removeprefix("process ")))

    def on_message(self, text):
        self.sentences.append(text)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"id": {number}, "prompt": "row {number}"}}\n' for number in range(400)))
    return JobSpec(inputs=(str(path),), output=str(tmp_path / "out.jsonl"))


def actors(size: int, **options) -> RayActorPool:
    model = {"model_id": "m"}
    return RayActorPool(LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs=options), size)


def ids(output: str) -> list[int]:
    return [json.loads(text)["id"] for text in Path(output).read_text().splitlines()]


async def test_two_engines_share_the_rows_and_the_death_of_one_costs_none(serve_url: str, spec: JobSpec):
    shares = [Path(f"{spec.journal.url}/0001-engine-{number}.jsonl") for number in (1, 2)]

    class Killer(Seen):
        def on_tick(self, stats):
            if len(self.pids.get("engine 1", [])) == 1 and min(map(rows, shares)) > 10:
                os.kill(self.pids["engine 1"][0], signal.SIGKILL)
                self.pids["engine 1"].append(0)

    seen = Killer()
    done = await Job(spec, actors(2, max_num_seqs=4, step_base_ms=30), listener=seen).run()
    assert (done.ok, ids(spec.output)) == (400, list(range(400)))
    assert done.run_engine_deaths == 1
    assert {name: len(pids) for name, pids in seen.pids.items()} == {"engine 1": 3, "engine 2": 1}


def rows(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


async def test_an_engine_that_cannot_start_says_its_own_reason(serve_url: str, spec: JobSpec):
    with pytest.raises(EngineStartFailed, match=r"^no such weights$"):
        await Job(spec, actors(1, start_error="no such weights")).run()


def test_a_killed_command_leaves_nothing_and_goes_on(cluster: Cluster, spec: JobSpec):
    """The first command has a cluster of its own: that must not outlive it. The second goes on elsewhere.

    Both as in a pod beside a Service named `penstock`.
    """
    words = (*spec.inputs, "-o", spec.output, "--engine", "sim", "--replicas", "2")
    words = (*words, "--step-base-ms", "15", "--max-num-seqs", "4")
    first = Command(*words, verb="batch", **SERVICE_VARIABLES)
    _until_journaled(spec, 20)
    assert first.scripts().isdisjoint(OF_NO_USE)
    assert first.gcs().environ()["RAY_AUTH_MODE"] == "token"
    first.work().send_signal(signal.SIGKILL)
    assert first.exit_code() == 128 + signal.SIGKILL
    assert first.left() == []
    second = Command(*words, "--address", cluster.address, verb="batch", **SERVICE_VARIABLES)
    assert second.exit_code() == 0, "\n".join(second.err)
    assert ids(spec.output) == list(range(400))
    assert second.left() == []


def _until_journaled(spec: JobSpec, least: int) -> None:
    folder, deadline = Path(spec.journal.url), time.monotonic() + 120
    while sum(map(rows, folder.glob("*engine*.jsonl"))) < least:
        assert time.monotonic() < deadline, "no row has ended"
        time.sleep(0.05)


@pytest.mark.parametrize("error", [OutOfMemoryError("Task was killed"), WorkerCrashedError()])
def test_a_process_that_ended_in_whatever_way_is_made_anew(error: Exception):
    assert isinstance(_translate(error, "engine-1"), WorkerLost)


def test_an_environment_that_cannot_be_made_is_not_tried_again():
    told = _translate(RuntimeEnvSetupError("pip failed"), "engine-1")
    assert isinstance(told, Unavailable)
    assert not isinstance(told, WorkerLost)
