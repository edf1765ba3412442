"""constraints/: each file admits a whole installation of what its users install with it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU = ROOT / "constraints" / "cpu.txt"
GPU = sorted((ROOT / "constraints").glob("vllm-*.txt"))
GPU_EXTRAS = ("vllm", "nixl", "otel", "dev", "docs")
OF_GPUS = "constraints/vllm-0.32.0.txt"
"""The set with the vLLM that the tests run on."""


def resolved(constraints: Path, *, python: str) -> subprocess.CompletedProcess[str]:
    """What uv finds for all extras of a GPU box; it reads the index and downloads no package."""
    extras = [word for extra in GPU_EXTRAS for word in ("--extra", extra)]
    platform = ["--no-python-downloads", "--python-version", python, "--python-platform", "linux"]
    command = [
        Path(sys.executable).with_name("uv"),
        "pip",
        "compile",
        "--no-header",
        "--no-annotate",
        "--color",
        "never",
    ]
    return subprocess.run(
        [*command, *platform, *extras, "--constraint", constraints, ROOT / "pyproject.toml"],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
    )


def test_there_is_a_set_for_each_supported_vllm():
    table = (ROOT / "docs" / "compatibility.md").read_text()
    supported = re.findall(r"^\| (0\.\d+\.\d+) \| yes", table, re.MULTILINE)
    assert [file.stem for file in GPU] == [f"vllm-{one}" for one in supported]


# On 3.12, which the GPU image has, the set that the image installs.
@pytest.mark.parametrize(
    ("file", "python"),
    [
        *(pytest.param(file, "3.11", marks=pytest.mark.full) for file in GPU),
        (ROOT / OF_GPUS, "3.12"),
    ],
    ids=lambda one: Path(one).stem,
)
def test_a_gpu_box_can_install_each_set(file: Path, python: str):
    found = resolved(file, python=python)
    if "error sending request" in found.stderr:
        pytest.skip(f"the package index is not reachable: {found.stderr}")
    assert found.returncode == 0, found.stderr
    wanted = {f"vllm=={file.stem.removeprefix('vllm-')}", f"ray=={version('ray')}", "uvicorn==0.54.0"}
    assert wanted <= set(found.stdout.split())


def test_a_constraint_that_contradicts_vllm_is_noticed(tmp_path: Path):
    file = tmp_path / "constraints.txt"
    file.write_text("vllm==0.32.0\napache-tvm-ffi==0.1.15.post2\n")
    assert "apache-tvm-ffi" in resolved(file, python="3.11").stderr


def test_the_cpu_set_is_what_is_installed_here():
    pins = re.findall(r"^([\w.-]+)==(\S+)$", CPU.read_text(), re.MULTILINE)
    assert len(pins) > 200
    assert {name: installed(name) for name, _ in pins} == dict(pins)


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@pytest.mark.parametrize(
    "file", ["scripts/setup", "Dockerfile.gpu", "README.md", "docs/gpu.md", "docs/operate/systemd.md"]
)
def test_whoever_installs_for_gpus_takes_the_tested_set(file: str):
    text = (ROOT / file).read_text()
    assert OF_GPUS in text
    assert not re.search(r"pip install +[\"']?\.\[vllm", text)
