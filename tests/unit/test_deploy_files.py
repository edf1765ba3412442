"""The Dockerfiles and the systemd unit: what they promise, held against the code they run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
from scripts.image_steps import instructions

from penstock.cli.serve.run import STOP_S
from penstock.kuberay import template

ROOT = Path(__file__).parents[2]
DOCKERFILES = [ROOT / "Dockerfile", ROOT / "Dockerfile.gpu"]
UNIT = ROOT / "deploy" / "systemd" / "penstock.service"

pytestmark = pytest.mark.parity("S29")


@pytest.fixture(params=DOCKERFILES, ids=lambda file: file.name)
def steps(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    return list(instructions(request.param.read_text()))


@pytest.fixture
def unit() -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNIT)
    return parser


def test_images_have_a_build_stage_and_bases_of_a_full_version(steps):
    bases = [value for name, value in steps if name == "FROM"]
    assert [base.endswith(" AS build") for base in bases] == [True, False]
    assert all(re.search(r":\d+\.\d+\.\d+-", base) for base in bases)


def test_images_run_as_the_user_of_the_manifests(steps):
    names = [name for name, _ in steps]
    assert dict(steps)["USER"] == str(template.part("user"))
    assert names.index("USER") < names.index("ENTRYPOINT")


def test_images_know_whether_they_are_healthy(steps):
    said = dict(steps)
    assert json.loads(said["HEALTHCHECK"].partition("CMD ")[2]) == ["penstock", "status"]


def test_the_unit_leaves_time_to_stop(unit):
    assert (unit["Service"]["KillMode"], unit["Service"]["KillSignal"]) == ("mixed", "SIGTERM")
    assert float(unit["Service"]["TimeoutStopSec"]) > STOP_S + 10


def test_the_unit_is_not_restarted_for_a_bad_config(unit):
    assert unit["Service"]["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_understands_the_unit(tmp_path: Path):
    command = str(Path(sys.executable).with_name("penstock"))
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text().replace("/opt/penstock/bin/penstock", command))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
