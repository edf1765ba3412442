"""Placement on a real Ray that claims two GPUs: what the replica's actor really holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.parity("S7")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By case of fake_gpus.py; a cluster of its own, because the shared one has no GPUs."""
    answer = tmp_path_factory.mktemp("placement") / "seen.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("fake_gpus.py")), str(answer)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "RAY_ADDRESS": "", "RAY_USAGE_STATS_ENABLED": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(answer.read_text())


def test_the_actor_holds_all_gpus_of_an_engine_that_fits_one_node(seen):
    assert seen["one_node"]["devices"] == "0,1"
    assert seen["one_node"]["bundles"] == [{"GPU": 2, "CPU": 3, "accelerator_type:L4": 0.001}]


def test_the_ray_executors_workers_have_the_gpus_not_the_actor(seen):
    assert seen["ray_executor"]["gpus"] == 0
    assert seen["ray_executor"]["bundles"] == [
        {"GPU": 1, "CPU": 2, "accelerator_type:L4": 0.001},
        {"GPU": 1, "CPU": 1, "accelerator_type:L4": 0.001},
    ]


def test_half_a_gpu_is_held(seen):
    assert seen["half"]["gpus"] == 0.5
    assert seen["half"]["devices"] in ("0", "1")


def test_on_cpu_no_gpu_is_held_and_nothing_is_grouped(seen):
    assert (seen["cpu"]["gpus"], seen["cpu"]["bundles"]) == (0, [])
