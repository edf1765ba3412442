"""Which files of a model's repository an engine reads: one format of its weights, not all."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import PurePosixPath

_NEVER = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.tflite", "*.ot", "*.mlmodel", "*.mlpackage/*", "*.ckpt",
    "onnx/*", "openvino*", "coreml/*", "runs/*", ".git*", ".cache/*", "optimizer.*", "training_args.bin",
)  # fmt: skip
_PICKLED = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "original/*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def model_files(names: Iterable[str]) -> list[str]:
    """Without other frameworks' weights, and without pickled ones where there are safetensors."""
    found = [name for name in names if not _any(name, _NEVER)]
    if any(fnmatch(name, "*.safetensors") and "/" not in name for name in found):
        found = [name for name in found if not _any(name, _PICKLED)]
    return found


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """All but weights."""
    return [name for name in names if not _any(name, (*_NEVER, *_PICKLED, *_WEIGHTS))]


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) or fnmatch(PurePosixPath(name).name, pattern) for pattern in patterns)
