"""Ray's start on a machine that is too busy for Ray's own limit: it is tried once more."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import pytest
import ray
from ray._private import utils as ray_utils

from penstock import ray_version
from penstock.data.backends.ray_cluster import connection_options, init_ray
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
    told: list[str] = []
    assert init_ray(told.append, address="local") == "ready"
    assert slow.left[0].poll() is not None
    assert [text.partition(" ")[0] for text in told] == ["Ray"]


def test_a_cluster_of_another_version_is_told_in_one_sentence(starts):
    """Ray's own text, as its `check_version_info` makes it."""
    metadata = {"ray_version": "2.57.1", "python_version": "3.12.4"}
    with pytest.raises(RuntimeError) as told:
        ray_utils.check_version_info(metadata, "node 10.0.0.1")
    starts(5, str(told.value))
    python = platform.python_version()
    with pytest.raises(Unavailable, match=f"Ray 2.57.1 with Python 3.12.4; .* Ray .* with Python {python}"):
        init_ray(address="10.0.0.1:6379")


@pytest.mark.parametrize(
    ("version", "says"), [("2.56.1", "Ray 2.56.1 is installed"), (None, "not installed")]
)
def test_a_ray_that_is_too_old_is_told(patched, version: str | None, says: str):
    patched(ray_version, "installed", lambda: version)
    with pytest.raises(Unavailable, match=f"{says}.*`pip install"):
        ray_version.check()


@pytest.mark.parametrize("version", ["2.57.0", "2.60.3", "2.61.0", "3.0.0.dev0"])
def test_newer_rays_are_tried(patched, version: str):
    patched(ray_version, "installed", lambda: version)
    ray_version.check()


def test_a_second_late_start_is_told(starts):
    starts(2)
    with pytest.raises(Unavailable, match="twice"):
        init_ray(address="local")


@pytest.mark.parametrize("mode", [None, "disabled"])
def test_a_cluster_that_refuses_is_not_said_to_be_silent(starts, monkeypatch, mode: str | None):
    monkeypatch.setenv("RAY_AUTH_MODE", mode) if mode else monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    starts(5, "Failed to connect to Ray cluster at 10.0.0.1:6379")
    with pytest.raises(Unavailable, match=r"'10\.0\.0\.1:6379' does not take .*RAY_AUTH_MODE=token"):
        init_ray(address="10.0.0.1:6379")


@pytest.mark.parametrize(("address", "why"), [("10.0.0.1:6379", LATE), ("local", "no disk")])
def test_other_failures_are_raised_at_once(starts, address: str, why: str):
    once = starts(5, why)
    with pytest.raises(Exception, match=why.partition(".")[0]):
        init_ray(address=address)
    assert len(once.left) == 1


@pytest.mark.parametrize(("depth", "place"), [(40, "unset"), (41, "/tmp")])
def test_sockets_of_ray_fit_wherever_temporary_files_go(
    monkeypatch: pytest.MonkeyPatch, depth: int, place: str
):
    monkeypatch.setattr("tempfile.tempdir", "/".ljust(depth, "d"))
    monkeypatch.setattr("os.environ", {})
    connection_options(None, cpus=1, verbose=False)
    assert os.environ.get("RAY_TMPDIR", "unset") == place
