"""Files of a model that cannot be its weights: refused by name before an engine starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import penstock
from penstock.config import LLMConfig
from penstock.engines.prepared import prepared
from penstock.errors import EngineStartFailed

pytestmark = pytest.mark.parity("S10")

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1548208\n"
MACOS = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(4096)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(penstock.demo_model(), tmp_path / "model"))


async def fault(source: Path, **arguments: str) -> str | None:
    loading = {"model_id": "m", "model_source": str(source)}
    config = LLMConfig.model_validate({"model_loading_config": loading, "engine_kwargs": arguments})
    try:
        await prepared(config, lambda phase: None)
    except EngineStartFailed as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors", POINTER, "only a pointer of Git LFS; run `git lfs pull` in its folder"),
        ("tokenizer.json", POINTER, "only a pointer of Git LFS; run `git lfs pull` in its folder"),
        ("._model.safetensors", MACOS, "a file of macOS that holds no weights; delete all `._*` files there"),
        ("model.safetensors", b"<html>", "no safetensors file, or is cut off; copy or download it again"),
    ],
)
async def test_a_file_that_holds_no_weights_is_named(folder: Path, name: str, content: bytes, said: str):
    (folder / name).write_bytes(content)
    assert await fault(folder) == f"Model 'm' in {folder} cannot start: its {name} is {said}."


async def test_of_several_forms_of_the_weights_one_is_enough(folder: Path):
    for name in ("m.gguf", "consolidated.safetensors", "pytorch_model.bin"):
        (folder / name).write_bytes(POINTER)
    assert await fault(folder) is None


async def test_a_file_that_is_cut_off_is_named_with_its_size(folder: Path):
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", 900_000)
    said = f"its model.safetensors is cut off: only 900000 of its {size} bytes are there; copy or download"
    assert said in (await fault(folder) or "")


async def test_a_pointer_in_place_of_the_one_file_of_a_model_is_named(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(POINTER)
    assert "its m.gguf is only a pointer" in (await fault(tmp_path / "m.gguf") or "")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "flax_model.msgpack", "README.md", "original"])
async def test_files_that_no_engine_reads_may_be_pointers(folder: Path, name: str):
    (folder / name).write_bytes(POINTER)
    assert await fault(folder) is None


async def test_weights_that_are_never_read_may_be_pointers(folder: Path):
    (folder / "model.safetensors").write_bytes(POINTER)
    assert await fault(folder, load_format="dummy") is None
