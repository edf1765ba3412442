"""The files of a model: its small ones, and the headers or sizes of its weights, from a folder or the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

from penstock import sources
from penstock.engines import weights as headers
from penstock.engines.weights import Tensor
from penstock.errors import DownloadFailed, SourceNotFound
from penstock.preflight.model import DTYPE_BYTES, ModelSize
from penstock.preflight.weights import COMPARED, ModelWeights

_SMALL = ("*.json", "*.jinja", "tokenizer.model*", "spiece.model", "*.tiktoken", "vocab.txt", "merges.txt")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True)
class ModelFiles:
    """sizes: bytes of every file by name, also of those that are not in `folder`."""

    folder: Path
    sizes: Mapping[str, int]

    @classmethod
    def at(cls, source: str) -> ModelFiles:
        """Of a folder as it is; of a hub id, with its small files downloaded.

        Raises: SourceNotFound, DownloadFailed.
        """
        folder = Path(expanduser(source.removeprefix("file://")))
        if not isdir(folder):
            folder = sources.fetch(source, only=_SMALL, tries=1)
            with suppress(DownloadFailed):  # then from the hub's cache
                return cls(folder, sources.sizes(source))
        try:
            return cls(
                folder, {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
            )
        except OSError as error:
            raise SourceNotFound(f"'{error.filename or folder}' cannot be read: {error.strerror}.") from error

    def read(self, name: str) -> dict[str, Any]:
        """The mapping in a JSON file; empty without the file. Raises: ValueError."""
        file = self.folder / name
        found = json.loads(file.read_bytes()) if file.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"{name} holds no mapping")
        return found

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Of all safetensors files, if every one is here; else none. Raises: Broken."""
        shards = [name for name in self._weight_files if name.endswith(".safetensors")]
        if not all((self.folder / name).is_file() for name in shards):
            return {}
        return {name: one for shard in shards for name, one in headers.tensors(self.folder / shard).items()}

    def weights(self, model: ModelSize, dtype: str) -> ModelWeights | None:
        """None where there are none. Raises: Broken."""
        if self.tensors:
            as_compared = model.pooling == (model.architecture == "BertModel") and not model.quantisation
            return ModelWeights(self.tensors, exact=as_compared and model.architecture in COMPARED.split())
        told: Any = self.read("model.safetensors.index.json").get("metadata") or {}
        size = int(told.get("total_size") or sum(self.sizes[name] for name in self._weight_files))
        if not model.quantisation:  # floats are converted when they are loaded
            size = size * DTYPE_BYTES[dtype] // DTYPE_BYTES.get(model.dtype or dtype, 2)
        return ModelWeights({}, size) if size else None

    def missing_bytes(self) -> int:
        """What has yet to be downloaded."""
        wanted = sources.model_files(self.sizes)
        return sum(self.sizes[name] for name in wanted if not (self.folder / name).is_file())

    @property
    def _weight_files(self) -> list[str]:
        names = [
            name for name in sources.model_files(self.sizes) if name.endswith(_WEIGHTS) and "/" not in name
        ]
        return sorted([name for name in names if not name.startswith("consolidated")] or names)
