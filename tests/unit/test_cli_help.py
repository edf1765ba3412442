"""What the command line says of itself: choices, completion, versions."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.app import app
from penstock.cli.process import guard
from penstock.errors import Unavailable

WIDE = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}


@pytest.mark.parametrize(
    ("command", "option", "choices"),
    [
        (["serve"], "--engine", "vllm|sglang|process|sim"),
        (["serve"], "--log-format", "text|json"),
        (["batch"], "--engine", "vllm|sglang|process|sim"),
        (["batch"], "--task", "generate|embed|classify|score"),
        (["batch"], "--reuse", "exact|all|off"),
        (["batch"], "--input-form", "jsonl|parquet|csv"),
        (["bench"], "--endpoint", "chat|completions"),
        (["ctl", "pause"], "--mode", "wait|keep|abort"),
        (["ctl", "sleep"], "--level", "1|2"),
        (["ctl", "sleep"], "--url", "Address of the service."),
        (["ctl", "shift"], "--timeout", "Seconds to wait for replicas."),
    ],
)
def test_help_lists_choices(command: list[str], option: str, choices: str):
    shown = CliRunner().invoke(app, [*command, "--help"], env=WIDE).stdout
    assert any(option in line and choices in line for line in shown.splitlines())


def test_engine_may_be_written_as_in_configs_of_ray():
    checked = CliRunner().invoke(
        app, ["batch", "run", "no.jsonl", "-o", "out", "--engine", "SIM", "--dry-run"]
    )
    assert "is not one of" not in checked.output


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("bash", {"COMP_WORDS": "penstock be", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "penstock be"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "penstock be", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_shells_complete_commands(shell: str, asked: dict[str, str]):
    env = {**os.environ, "_PENSTOCK_COMPLETE": f"complete_{shell}", **asked}
    command = [sys.executable, "-m", "penstock.cli"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert [word for word in re.findall(r"\w+", done.stdout) if word in ("bench", "batch", "serve")] == [
        "bench"
    ]


def test_engines_are_refused_on_other_systems(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(Unavailable, match="Engines run on Linux only"):
        guard.guarded(lambda signals_fd: 0, stop_s=1)


@pytest.fixture
def fake_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB, 575.57.08'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("fake_gpu")
def test_version_names_what_a_bug_report_needs():
    found = json.loads(CliRunner().invoke(app, ["version", "--json"]).stdout)
    assert list(found) == [
        *("penstock", "python", "vllm", "sglang", "ray", "torch", "vllm_off", "cuda", "gpus"),
    ]
    assert found["penstock"] == penstock.__version__
    assert found["python"].startswith(platform.python_version())
    assert found["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB, driver 575.57.08"]
    lines = CliRunner().invoke(app, ["version"]).stdout.splitlines()
    assert f"penstock        {penstock.__version__}" in lines
    assert "gpus            NVIDIA H100 80GB HBM3, 81559 MiB, driver 575.57.08" in lines
