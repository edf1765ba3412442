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
    tools = clone / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: NVIDIA L4'\n")
    (tools / "nvidia-smi").chmod(0o755)
    done = set_up(clone, PATH=f"{tools}:{os.environ['PATH']}", PENSTOCK_ACCELERATOR="")
    assert "--constraint constraints/vllm-0.32.0.txt --editable .[vllm,dev,docs] failed" in done.stderr
