"""The sources of a config's model and tokenizer, as folders of this node and of all others of the engine.

Sources that the engine itself reads (a `load_format` that streams, a file of one format) stay as they are.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from os.path import expanduser
from pathlib import Path

from penstock.config import LLMConfig
from penstock.config.schema.sections import BucketSource
from penstock.sources.cache import pin
from penstock.sources.every_node import on_every_node
from penstock.sources.fetch import Only, fetch, matches
from penstock.sources.hub import is_hub_id
from penstock.sources.transfer import Watch, silent

_USUAL_FORMATS = (None, "auto", "hf", "safetensors")
_OWN_WAYS = {"download_dir", "hf_token", "ignore_patterns"}
"""Engine arguments that say how the engine itself downloads."""


_NEVER = (
    "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.tflite", "*.ot", "*.mlmodel", "*.mlpackage/*", "*.ckpt",
    "onnx/*", "openvino*", "coreml/*", "runs/*", ".git*", ".cache/*", "._*", "optimizer.*",
    "training_args.bin",
)  # fmt: skip
_PICKLED = ("pytorch_model*.bin", "model*.bin", "*.pt", "*.pth", "original/*")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


def model_files(names: Iterable[str]) -> list[str]:
    """Without other frameworks' weights, and without pickled ones where there are safetensors."""
    found = [name for name in names if not matches(name, _NEVER)]
    if any(fnmatch(name, "*.safetensors") and "/" not in name for name in found):
        found = [name for name in found if not matches(name, _PICKLED)]
    return found


def tokenizer_files(names: Iterable[str]) -> list[str]:
    """All but weights."""
    return [name for name in names if not matches(name, (*_NEVER, *_PICKLED, *_WEIGHTS))]


def is_here(config: LLMConfig) -> bool:
    """Whether there is nothing to fetch."""
    model, tokenizer = config.model_loading_config.model_source, config.model_loading_config.tokenizer_source
    if isinstance(model, BucketSource) and model.extra_files:
        return False
    sources = [config.model_source, *([tokenizer] if tokenizer else [])]
    return all(isinstance(one, str) and not _is_ours(one, config) for one in sources)


def with_local_sources(config: LLMConfig, files: Only = model_files, watch: Watch = silent) -> LLMConfig:
    """The same config, with folders of this node in place of sources elsewhere. Downloads what is not here.

    files: which of the model's, see `fetch`.
    Raises: SourceNotFound, DownloadFailed; what `watch` raises.
    """
    loading, limit_s = config.model_loading_config, config.engine_start_timeout_s
    given = {"model_source": loading.model_source, "tokenizer_source": loading.tokenizer_source}
    model = loading.model_source
    if isinstance(model, BucketSource) or _is_ours(config.model_source, config):
        revision = config.engine_kwargs.get("revision")
        given["model_source"] = _folder(model or config.model_source, revision, files, limit_s, watch=watch)
    tokenizer = loading.tokenizer_source
    if isinstance(tokenizer, BucketSource) or (tokenizer and _is_ours(tokenizer, config)):
        revision = config.engine_kwargs.get("tokenizer_revision")
        given["tokenizer_source"] = _folder(tokenizer, revision, tokenizer_files, limit_s, watch=watch)
    return config.model_copy(update={"model_loading_config": loading.model_copy(update=given)})


def _is_ours(source: str, config: LLMConfig) -> bool:
    if Path(expanduser(source)).exists():
        return False
    kwargs = config.engine_kwargs
    if kwargs.get("load_format") not in _USUAL_FORMATS or kwargs.keys() & _OWN_WAYS:
        return False
    return "://" in source or source.startswith(("/", "./", "../", "~")) or is_hub_id(source)


@on_every_node
def _folder(
    source: str | BucketSource, revision: str | None, only: Only, limit_s: float, *, watch: Watch = silent
) -> str:
    bucket = source if isinstance(source, BucketSource) else BucketSource(bucket_uri=source)
    uri = bucket.bucket_uri
    if revision and is_hub_id(uri):
        uri = f"{uri}@{revision}"
    extra = [(one.bucket_uri, one.destination_path) for one in bucket.extra_files]
    within = [(origin, to) for origin, to in extra if not Path(to).is_absolute()]
    folder = fetch(uri, within, timeout_s=limit_s, only=only, watch=watch)
    pin(folder)
    for origin, to in extra:
        if Path(to).is_absolute():
            _place(fetch(origin, timeout_s=limit_s, watch=watch), Path(to), Path(origin).name)
    return str(folder)


def _place(folder: Path, destination: Path, name: str) -> None:
    """Copies what was fetched to where the user wants it: a file as `destination`, a folder's files below."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    alone = len(files) == 1 and files[0] == folder / name
    for path in files:
        to = destination if alone else destination / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        unfinished = to.with_name(f"{to.name}.{os.getpid()}")
        shutil.copyfile(path, unfinished)
        unfinished.replace(to)
