"""Batch over engines of its own, in Ray actors: all at once, each to be killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from tests.ray.command import Command

from penstock.config import LLMConfig
from penstock.data.actor import Actors
from penstock.data.job import Job
from penstock.data.order import Order
from penstock.data.watcher import Watcher
from penstock.errors import EngineStartFailed

pytestmark = pytest.mark.parity("X5", "D13")


class Seen(Watcher):
    """Processes of the engines, and what was said."""

    def __init__(self) -> None:
        self.pids: dict[str, list[int]] = {}
        self.sentences: list[str] = []

    def phase(self, worker, phase):
        if phase.startswith("process "):
            self.pids.setdefault(worker, []).append(int(phase.removeprefix("process ")))

    def said(self, text):
        self.sentences.append(text)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"id": {number}, "prompt": "row {number}"}}\n' for number in range(400)))
    return Order(inputs=(str(path),), output=str(tmp_path / "out.jsonl"))


def actors(size: int, **options) -> Actors:
    model = {"model_id": "m"}
    return Actors(LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs=options), size)


def ids(output: str) -> list[int]:
    return [json.loads(text)["id"] for text in Path(output).read_text().splitlines()]


async def test_two_engines_share_the_rows(serve_url: str, order: Order):
    seen = Seen()
    done = await Job(order, actors(2, max_num_seqs=4, step_base_ms=20), watcher=seen).run()
    assert (done.ok, ids(order.output)) == (400, list(range(400)))
    assert len(seen.pids) == 2
    shares = [Path(f"{order.journal.url}/0001-engine-{number}.jsonl") for number in (1, 2)]
    assert min(share.read_bytes().count(b"\n") for share in shares) > 0


async def test_a_killed_actor_costs_no_row(serve_url: str, order: Order):
    class Killer(Seen):
        def look(self, tally):
            if tally.ended > 50 and len(self.pids.get("engine 1", [])) == 1:
                os.kill(self.pids["engine 1"][0], signal.SIGKILL)
                self.pids["engine 1"].append(0)

    seen = Killer()
    done = await Job(order, actors(2, max_num_seqs=4, step_base_ms=20), watcher=seen).run()
    assert (done.ok, ids(order.output)) == (400, list(range(400)))
    assert done.run_engine_deaths == 1
    assert len(seen.pids["engine 1"]) == 3


async def test_an_engine_that_cannot_start_says_its_own_reason(serve_url: str, order: Order):
    with pytest.raises(EngineStartFailed, match=r"^no such weights$"):
        await Job(order, actors(1, start_error="no such weights")).run()


def test_a_killed_command_leaves_nothing_and_goes_on(order: Order):
    words = (*order.inputs, "-o", order.output, "--engine", "sim", "--replicas", "2")
    words = (*words, "--step-base-ms", "15", "--max-num-seqs", "4")
    first = Command(*words, verb="batch")
    _until_journaled(order, 20)
    first.work().send_signal(signal.SIGKILL)
    assert first.exit_code() == 128 + signal.SIGKILL
    assert first.left() == []
    second = Command(*words, verb="batch")
    assert second.exit_code() == 0, "\n".join(second.err)
    assert ids(order.output) == list(range(400))
    assert second.left() == []


def _until_journaled(order: Order, rows: int) -> None:
    folder, deadline = Path(order.journal.url), time.monotonic() + 120
    while sum(file.read_bytes().count(b"\n") for file in folder.glob("*engine*.jsonl")) < rows:
        assert time.monotonic() < deadline, "no row has ended"
        time.sleep(0.05)
