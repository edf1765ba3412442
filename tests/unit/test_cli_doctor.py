"""`penstock doctor` and `penstock cache`: what this machine has, and what of it is trouble."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import doctor
from penstock.cli.app import app
from penstock.cli.version import versions

WELL: dict[str, Any] = {
    **versions(),
    "vllm": "0.32.0",
    "cuda": "13.0",
    "gpus": ["NVIDIA L4, 23034 MiB, driver 580.95.05"],
    "vllm_off": [],
    "shared_memory_bytes": 8 << 30,
    "open_files": "65536 of 65536",
    "disk_free_bytes": 10**12,
    "cache": "/cache",
}


def test_a_machine_that_is_well_has_nothingtroubles():
    assert list(doctor.troubles(WELL)) == []
    assert list(doctor.troubles({**WELL, "cuda": None, "gpus": []})) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vllm": None, "sglang": None}, "No engine is installed: pip install 'penstock[vllm]'"),
        ({"gpus": []}, "nvidia-smi shows no GPU"),
        ({"cuda": None}, "There is a GPU, and vLLM's build for CPUs is installed"),
        (
            {"gpus": ["NVIDIA L4, 23034 MiB, driver 550.54"]},
            "driver 550.54 is too old for CUDA 13.0: install 580",
        ),
        ({"cuda": "12.8", "gpus": ["T4, 15 GiB, driver 470.1"]}, "too old for CUDA 12.8: install 525"),
        ({"shared_memory_bytes": 64 << 20}, "/dev/shm has only 67.1 MB; several GPUs need more"),
        ({"open_files": "1024 of 4096"}, "may open 1024 of 4096 files; many clients need more: ulimit -n"),
        ({"disk_free_bytes": 10**9}, "The disk of /cache has 1.0 GB free, too little for most models"),
        ({"vllm_off": ["fast_stream: it moved"]}, "Off, as it does not fit the installed vLLM: fast_stream"),
    ],
)
def test_what_will_be_trouble_is_one_sentence_with_what_to_do(changed: dict[str, Any], said: str):
    (sentence,) = doctor.troubles({**WELL, **changed})
    assert said in sentence


def test_it_shows_names_of_keys_and_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # of tests with an engine in the same process
    monkeypatch.setenv("PENSTOCK_API_KEY", "a-secret")
    monkeypatch.setattr(doctor, "_SHARED_MEMORY", Path("/no/folder"))  # as where there is no Linux
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert "PENSTOCK_API_KEY" in shown
    assert "shared memory   0 bytes" in shown
    assert "a-secret" not in shown
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert told["cpus"] == len(os.sched_getaffinity(0))
    assert told["memory_bytes"] > told["memory_free_bytes"] > 0
    assert told["set"] == ["PENSTOCK_API_KEY"]


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the hub, and an adapter of a bucket."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    model = tmp_path / "hub" / "models--org--tiny"
    (model / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (model / "snapshots" / ("a" * 40) / "model.safetensors").write_bytes(bytes(2_000_000))
    version = tmp_path / "own" / "sources" / "s3--bucket--french-0123abcd" / "v1"
    version.mkdir(parents=True)
    (version / "adapter.safetensors").write_bytes(bytes(1_000))
    return tmp_path


def test_downloads_are_listed_and_removed(downloaded: Path):
    listed = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert [(one["name"], one["size_bytes"]) for one in listed] == [
        ("org/tiny", 2_000_000),
        ("s3/bucket/french", 1_000),
    ]
    shown = CliRunner().invoke(app, ["cache"]).stdout
    assert "2.0 MB" in shown
    assert shown.splitlines()[-1].split() == ["2.0", "MB", "in", "all"]
    assert "Did you mean 'org/tiny'?" in str(
        CliRunner().invoke(app, ["cache", "--remove", "org/tiyn"]).stderr
    )
    twice = CliRunner().invoke(app, ["cache", *["--remove", "org/tiny"] * 2])
    assert (twice.exit_code, twice.stdout) == (0, "Removed org/tiny, 2.0 MB.\n")
    assert not (downloaded / "hub" / "models--org--tiny").exists()
    listed = json.loads(CliRunner().invoke(app, ["cache", "--json"]).stdout)
    assert [one["name"] for one in listed] == ["s3/bucket/french"]


def test_what_somebody_else_has_downloaded_is_not_removed(downloaded: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(folder: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    refused = CliRunner().invoke(app, ["cache", "--remove", "s3/bucket/french"])
    assert (refused.exit_code, "s3--bucket--french-0123abcd cannot be removed" in refused.stderr) == (1, True)


def test_what_a_process_uses_is_not_removed(downloaded: Path):
    version = downloaded / "own" / "sources" / "s3--bucket--french-0123abcd" / "v1"
    with version.with_name("v1.use").open("w") as pinned:
        fcntl.flock(pinned, fcntl.LOCK_SH)
        refused = CliRunner().invoke(app, ["cache", "--remove", "s3/bucket/french"])
    assert refused.exit_code
    assert "s3/bucket/french is in use" in refused.stderr
    assert version.exists()
