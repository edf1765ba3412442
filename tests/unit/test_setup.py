"""scripts/setup in a copy of the repository without an index: it goes as far as its first download."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("scripts", "constraints"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'penstock'\nversion = '0'\n")
    return tmp_path


def set_up(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Without an index, and without the packages of any folder."""
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(
        ["bash", "scripts/setup"],
        cwd=clone,
        env={**os.environ, "PYTHON": sys.executable, **pip, **variables},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_half_a_virtual_environment_is_made_anew(clone: Path):
    """Debian's Python leaves one where python3-venv is not installed; so does Ctrl-C."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    done = set_up(clone, PENSTOCK_ACCELERATOR="cpu")
    assert subprocess.run([clone / ".venv/bin/python", "-m", "pip", "--version"]).returncode == 0
    assert "No module named pip" not in done.stderr
    assert "No matching distribution found for torch==2.13.0+cpu" in done.stderr  # pip's reason is shown
    assert done.returncode == 1


def test_a_gpu_box_gets_the_set_for_gpus(clone: Path):
    path = tools(clone, **{"nvidia-smi": "echo 'GPU 0: NVIDIA L4'"})
    done = set_up(clone, PATH=path, PENSTOCK_ACCELERATOR="")
    assert "--constraint constraints/vllm-0.32.0.txt --editable .[vllm,dev,docs] failed" in done.stderr


def tools(clone: Path, **programs: str) -> str:
    """A PATH on which these scripts come first."""
    (clone / "tools").mkdir()
    for name, text in programs.items():
        (clone / "tools" / name.replace("_", ".")).write_text(f"#!/bin/sh\n{text}\n")
        (clone / "tools" / name.replace("_", ".")).chmod(0o755)
    return f"{clone / 'tools'}:{os.environ['PATH']}"


PYTHONS = ("python3", *(f"python3_{minor}" for minor in range(11, 15)))
OLD = dict.fromkeys(PYTHONS, "[ $1 = -V ] && echo Python 3.10.12 && exit; exit 1")


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        ({"uname": "echo Darwin"}, "Penstock runs on Linux, and this is Darwin: use Docker"),
        (OLD, "Penstock needs Python 3.11 or newer; 'python3' is Python 3.10.12. Install one"),
        (OLD | {"python3_12": f'exec {sys.executable} "$@"'}, "==> virtual environment in .venv"),
    ],
)
def test_another_machine_gets_one_sentence(clone: Path, programs: dict[str, str], says: str):
    done = set_up(clone, PATH=tools(clone, **programs), PYTHON="", PENSTOCK_ACCELERATOR="cpu")
    assert done.returncode == 1
    assert (done.stderr + done.stdout).startswith(says) or says in done.stdout
