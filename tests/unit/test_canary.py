"""Canaries: when a version is worse for sure, by what steps it goes up, and what a killed control leaves."""

from __future__ import annotations

import random
import re
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.config.schema.versions import CanaryConfig, VersionConfig
from penstock.metrics import FIRST_TOKEN, INTER_TOKEN, Buckets, GatewayMetrics
from penstock.serve.control.canary import _WIDTH, Canaries, _Canary, fault
from penstock.serve.control.state import CanaryReport
from penstock.serve.routing.split import Splits

pytestmark = pytest.mark.parity("X15")


BOUNDS = CanaryConfig(version="b", step_s=10, min_requests=20)


def counted(requests: int, failed: int = 0, ttft_s: float = 0.1, itl_s: float = 0.02) -> list[float]:
    """As a gateway counts streams of two tokens, give or take a third of their times."""
    times = [(FIRST_TOKEN, ttft_s), (INTER_TOKEN, itl_s)]
    found: list[float] = [requests, failed]
    for latency, seconds in times:
        buckets = Buckets(latency)
        for i in range(requests):
            buckets.observe(seconds * (0.7 + 0.6 * (i % 10) / 9))
        found += buckets.numbers()
    return found


@pytest.mark.parametrize(
    ("mine", "others", "says"),
    [
        (counted(20), counted(400), ""),
        (counted(20, failed=1), counted(400), ""),
        (counted(200, failed=10), counted(4000), "10 of 200 requests failed, beside 0.0% of the others"),
        (counted(200, failed=10), counted(4000, failed=200), ""),
        (counted(10, ttft_s=0.3), counted(200), r"time to the first token is [23]\.\d times"),
        (counted(10, itl_s=0.06), counted(200), r"inter-token latency is [23]\.\d times"),
        (counted(5, ttft_s=0.3), counted(200), ""),
        (counted(200, ttft_s=0.15), counted(4000), ""),
        (counted(200, failed=0, itl_s=0.022), counted(4000), ""),
    ],
)
def test_a_canary_is_worse_when_it_is_so_for_sure(mine: list[float], others: list[float], says: str):
    found = fault(BOUNDS, [*mine, *others], others)
    assert re.search(says, found) if says else not found


def clean(seed: int) -> bool:
    """Whether a version that is just as good as the other one passes, by chance alone."""
    draws = random.Random(seed)
    canary = _Canary(BOUNDS, 0, 0.0, "")
    sides = [[0, 0, Buckets(FIRST_TOKEN), Buckets(INTER_TOKEN)] for _ in range(2)]
    now = 0.0
    while not canary.outcome:
        now += 0.5
        for side, count in zip(sides, (5, 50), strict=True):
            for _ in range(count):
                side[0] += 1
                side[1] += draws.random() < 0.01
                side[2].observe(draws.lognormvariate(-2, 0.8))
                side[3].observe(draws.lognormvariate(-4, 0.4))
        counts = [number for one in sides for number in (*one[:2], *one[2].numbers(), *one[3].numbers())]
        canary.hear("g", CanaryReport("", {}, counts))
        canary.look(now)
    return "has passed" in canary.outcome


def test_a_version_that_is_as_good_passes():
    assert sum(clean(seed) for seed in range(30)) >= 29


class Control:
    """`Canaries` beside one gateway, by a clock of the test."""

    def __init__(self, file: Path) -> None:
        self.said: list[str] = []
        self.changes: list[None] = []
        self.database = sqlite3.connect(file, isolation_level=None)
        self.canaries = Canaries(self.database, lambda: self.changes.append(None), self.said.append)
        self.now = time.time()

    def pass_time(self, mine: list[float], others: list[float], key: str = "qwen@b 1") -> float:
        report = CanaryReport(key, BOUNDS.model_dump(), [*mine, *others])
        self.canaries.hear("g", [report])
        self.canaries.look(self.now)
        return self.canaries.states()[key].percent

    def step(self, n: int, **bad: Any) -> float:
        self.now += 11
        return self.pass_time(counted(100 * n, **bad), counted(1000 * n))


def test_a_canary_goes_up_by_steps_and_stays_there_over_a_kill(tmp_path: Path):
    control = Control(tmp_path / "db")
    assert control.pass_time(counted(0), counted(0)) == 5
    assert [control.step(n) for n in (1, 2)] == [25, 50]
    assert control.pass_time(counted(210), counted(2000)) == 50  # too early
    control.now += 11
    assert control.pass_time(counted(215), counted(2000)) == 50  # too few requests
    again = Control(tmp_path / "db")  # the next control begins to count anew
    assert again.pass_time(counted(300), counted(2100)) == 50
    again.now = control.now
    assert [again.step(n) for n in (4, 5)] == [100, 100]
    assert "has passed, at 100 %" in again.said[-1]


def test_a_canary_that_is_taken_back_stays_back(tmp_path: Path):
    control = Control(tmp_path / "db")
    control.pass_time(counted(0), counted(0))
    assert control.step(1, failed=20) == 0
    assert "canary qwen@b taken back from 5 %: 20 of 100" in control.said[-1]
    again = Control(tmp_path / "db")
    assert again.pass_time(counted(0), counted(0)) == 0
    assert again.pass_time(counted(0), counted(0), "qwen@b 2") == 5  # it is another one
    assert "20 of 100" in again.canaries.states()["qwen@b 1"].outcome


def test_a_canary_is_taken_back_though_its_outcome_cannot_be_stored(tmp_path: Path):
    control = Control(tmp_path / "db")
    control.pass_time(counted(0), counted(0))
    before = len(control.changes)
    control.database.close()
    assert control.step(1, failed=20) == 0
    assert len(control.changes) == before + 1


def test_a_full_disk_keeps_no_canary_from_its_begin(tmp_path: Path):
    control = Control(tmp_path / "db")
    control.database.execute("PRAGMA query_only = ON")
    assert control.pass_time(counted(0), counted(0)) == 5


def test_versions_that_come_and_go_beside_a_canary_are_not_counted_as_requests(tmp_path: Path):
    canaries = {"b": BOUNDS}
    versions = {one: VersionConfig(of="qwen", name=one, canary=canaries.get(one)) for one in "abc"}
    metrics, control = GatewayMetrics(), Control(tmp_path / "db")
    splits = Splits(metrics)
    for beside in ("ac", "a", "ac", "ac"):
        splits.follow({one: versions[one] for one in ("b", *beside)})
        for one, requests in [("b", 30), *((one, 300) for one in beside)]:
            for number in range(requests):
                splits.ended(one, failed=number < 10)
                metrics.model(one).on("/v1/chat/completions").first_token.observe(0.1)
        control.canaries.hear("g", splits.reports())
        control.canaries.look(control.now)
        (canary,) = control.canaries._canaries.values()
        assert canary.sum[_WIDTH] in (0, 600)
    assert (canary.sum[0], canary.sum[_WIDTH]) == (30, 600)


def test_a_full_disk_hides_no_canary_from_the_next_control(tmp_path: Path):
    Control(tmp_path / "db").pass_time(counted(0), counted(0))
    again = Control(tmp_path / "db")
    again.database.execute("PRAGMA query_only = ON")  # every write fails, as there
    assert again.pass_time(counted(0), counted(0)) == 5
