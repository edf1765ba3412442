"""Reads the headers of weight files, and says what is wrong with them before an engine reads them.

An engine's own error about such a file does not name it. Nothing here loads a tensor: a header is a few
kilobytes. Imports no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import sources

_HEADER_LIMIT_BYTES = 100 << 20
_LFS_POINTER = b"version https://git-lfs"

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype: as safetensors names it, such as BF16. size_bytes: in the file."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


class Broken(ValueError):
    """What is wrong with the files of a model or an adapter, as the end of a sentence about it."""


def check(source: Path) -> None:
    """Checks a model's files: those directly in a folder, or the one that `source` is. Raises: Broken."""
    found = source.iterdir() if source.is_dir() else (source,)
    files = {file.name: file for file in found if not file.is_dir()}
    for name in sorted(files):
        if name.startswith("._") and name.endswith(".safetensors"):
            raise Broken(f"its {name} is a file of macOS that holds no weights; delete all `._*` files there")
    names = sorted(sources.model_files(files))
    if shards := [name for name in names if name.endswith(".safetensors")]:
        # Of several forms of the weights in one folder, only one has to be there.
        for name in [name for name in shards if not name.startswith("consolidated")] or shards:
            shapes(files[name])
    for name in names:
        if name == "tokenizer.json" or (not shards and name.endswith((".bin", ".gguf"))):
            _start(files[name], len(_LFS_POINTER))


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensors of all safetensors files of a folder by name. Raises: as `shapes`."""
    return {name: shape for file in folder.glob("*.safetensors") for name, shape in shapes(file).items()}


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a safetensors file's tensors by name. Raises: as `tensors`."""
    return {name: tensor.shape for name, tensor in tensors(file).items()}


def tensors(file: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name. Raises: Broken when it is none, truncated or unreadable."""
    length = int.from_bytes(_start(file, len(_LFS_POINTER))[:8], "little")
    header = _start(file, 8 + length)[8:] if length < _HEADER_LIMIT_BYTES else b""
    if len(header) < length:
        raise Broken(f"its {file.name} is no safetensors file, or is cut off; copy or download it again")
    try:
        entries: dict[str, Any] = json.loads(header)
        found = {name: _tensor(entry) for name, entry in entries.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name in found), default=0)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise Broken(f"its {file.name} is no safetensors file") from error
    size = file.stat().st_size
    if size < 8 + length + end:
        there = f"only {size} of its {8 + length + end} bytes are there"
        raise Broken(f"its {file.name} is cut off: {there}; copy or download it again")
    return found


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    return Tensor(entry["dtype"], tuple(entry["shape"]), end - start)


def _start(file: Path, size: int) -> bytes:
    """The first bytes of a file. Raises: Broken for an unreadable file, and for a pointer of Git LFS."""
    try:
        with file.open("rb") as stream:
            found = stream.read(size)
    except OSError as error:
        raise Broken(f"its {file.name} cannot be read ({error.strerror})") from error
    if found.startswith(_LFS_POINTER):
        raise Broken(f"its {file.name} is only a pointer of Git LFS; run `git lfs pull` in its folder")
    return found
