"""Ray's start on a machine that is too busy for Ray's own limit: it is tried once more."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import ray

from penstock.data.backends.ray_cluster import init_ray
from penstock.errors import Unavailable

LATE = "The current node timed out during startup. This could happen because ..."


class Starts:
    """`ray.init` as it fails so many times, each time leaving a process behind."""

    def __init__(self, late: int, why: str = LATE) -> None:
        self.late, self.why = late, why
        self.left: list[subprocess.Popen[bytes]] = []

    def __call__(self, **wishes: Any) -> str:
        if len(self.left) == self.late:
            return "ready"
        self.left.append(subprocess.Popen(["sleep", "600"]))
        raise Exception(self.why)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch):
    made: list[Starts] = []

    def make(late: int, why: str = LATE) -> Starts:
        made.append(Starts(late, why))
        monkeypatch.setattr(ray, "init", made[-1])
        return made[-1]

    monkeypatch.setattr(ray, "shutdown", lambda: None)
    yield make
    for process in (process for one in made for process in one.left):
        process.kill()
        process.wait()


def test_a_start_that_was_too_late_is_tried_again_and_leaves_nothing(starts):
    slow = starts(1)
    assert init_ray(address="local") == "ready"
    assert slow.left[0].poll() is not None


def test_a_second_late_start_is_told(starts):
    starts(2)
    with pytest.raises(Unavailable, match="twice"):
        init_ray(address="local")


@pytest.mark.parametrize(("address", "why"), [("10.0.0.1:6379", LATE), ("local", "no disk")])
def test_other_failures_are_raised_at_once(starts, address: str, why: str):
    once = starts(5, why)
    with pytest.raises(Exception, match=why.partition(".")[0]):
        init_ray(address=address)
    assert len(once.left) == 1
