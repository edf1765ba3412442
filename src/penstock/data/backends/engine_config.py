"""What batch adds to an engine's config and adapters, and what of it identifies the engine's answers."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from modulefinder import ModuleFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from penstock.config import Settings
from penstock.config.messages.redact import is_secret, masked
from penstock.config.schema.sections import TASKS, BucketSource
from penstock.data.rows.request import Kind
from penstock.data.storage.paths import LocalPath
from penstock.layers.adapters import AdapterDownloader

if TYPE_CHECKING:
    from penstock.config import LLMConfig
    from penstock.config.schema.sections import LoraConfig

_ADAPTERS = {"dynamic_lora_loading_path", "adapters"}
_HOOKS = ("preprocessor", "preprocessor_options", "postprocessor", "postprocessor_options")
_SLASH = "--"
"""In place of an id's slash: an adapter's name is that of a folder."""

SPEED_ONLY = frozenset(
    {
        "block_size",
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)
"""Engine arguments that change how fast an engine answers, not what."""


def with_usage_details(config: LLMConfig) -> LLMConfig:
    """The config with cached tokens in each response's usage, unless the user says otherwise."""
    if config.engine_name not in ("vllm", "sim"):  # engines that have this argument
        return config
    kwargs = {"enable_prompt_tokens_details": True, **config.engine_kwargs}
    return config.model_copy(update={"engine_kwargs": kwargs})


def with_runner(config: LLMConfig, kind: Kind) -> LLMConfig:
    """The config with the vLLM arguments that run the model for this task, unless the user gives them.

    Without them vLLM runs a model that can generate as a generator only.
    """
    kwargs = config.engine_kwargs
    if config.engine_name != "vllm" or kind == "generate" or kwargs.keys() & {"runner", "convert"}:
        return config
    return config.model_copy(update={"engine_kwargs": {**TASKS[kind], **kwargs}})


_FOLDERS = ("tokenizer", "generation_config", "hf_config_path")
"""vLLM's arguments that may name a folder from which answers follow."""

_CONTENT_BYTES = 1 << 20
"""Files up to this size are compared by content, larger ones (weights) by size and time of change."""


def engine_identity(config: LLMConfig) -> dict[str, Any]:
    """What an engine's answers depend on, as JSON values: no sizes, no placement and no secrets.

    `files` has a version of each local file that the config names: of the model, its tokenizer and adapters,
    of the user's code, and of templates and schemas among the engine's arguments. Files behind a URL or a hub
    id are not looked at: there the name stands for them.
    """
    hooks = {name: getattr(config, name) for name in _HOOKS}
    kwargs = {name: value for name, value in config.engine_kwargs.items() if name not in SPEED_ONLY}
    return {
        "model": masked(config.model_loading_config.model_dump()),
        "engine": Settings.read().engine_cls or config.engine_name,
        "adapters": masked(config.lora_config and config.lora_config.model_dump(include=_ADAPTERS)),
        "engine_kwargs": {name: str(masked(value)) for name, value in kwargs.items() if not is_secret(name)},
        **{name: _named(hook) for name, hook in hooks.items() if hook is not None},
        "files": {name: _version(file) for name, file in _files(config) if os.path.isfile(file)},
    }


def lacks_chat_template(config: LLMConfig) -> bool:
    """Whether the model is in a folder of this machine, and is one that only completes texts."""
    source = config.engine_kwargs.get("tokenizer") or config.model_loading_config.tokenizer_source
    folder = _local(str(source or config.model_source))
    if config.engine_name == "sim" or config.engine_kwargs.get("chat_template") or folder is None:
        return False
    if any(folder.glob("*.jinja")) or any(folder.glob("chat_template*")) or any(folder.glob("tekken*")):
        return False
    try:
        return b'"chat_template"' not in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


def _named(hook: Any) -> str:
    """The user's code by its path; code from Python by its name and a digest of its source."""
    name = getattr(hook, "__qualname__", None)
    if name is None:
        return str(masked(hook))
    try:
        return f"{name} {_digest(inspect.getsource(hook).encode())}"
    except (OSError, TypeError):  # defined in a console
        return str(name)


def _files(config: LLMConfig) -> Iterator[tuple[str, Path]]:
    """Paths that the config names, each with a name that is the same on other machines."""
    loading, lora, kwargs = config.model_loading_config, config.lora_config, config.engine_kwargs
    sources: dict[str, Any] = {
        "model_source": config.model_source,
        "tokenizer_source": loading.tokenizer_source,
        **{name: kwargs.get(name) for name in _FOLDERS},
    }
    if lora is not None:
        sources |= {"dynamic_lora_loading_path": lora.dynamic_lora_loading_path, **lora.adapters}
    for name, source in sources.items():
        text = source.bucket_uri if isinstance(source, BucketSource) else source
        if isinstance(text, str) and (path := _local(text)) is not None:
            for file in LocalPath(path).files():
                if not any(part.startswith(".") for part in file.name.split("/")):
                    yield f"{name}/{file.name or '.'}", path / file.name
    for hook in (config.preprocessor, config.postprocessor):
        if isinstance(hook, str):
            yield from _modules(hook.partition(":")[0])
    for text in _texts(kwargs):
        if (path := _local(text)) is not None:
            yield text, path


def _modules(name: str) -> Iterator[tuple[str, Path]]:
    """The files of a module and of what it imports, without installed packages. Runs none of them.

    Nothing for a module that is not on this machine, as one of a `runtime_env`.
    """
    python = sysconfig.get_path("stdlib")
    own = [one for one in sys.path if not one.startswith(python) and not one.endswith("-packages")]
    finder = ModuleFinder([one or "." for one in own], excludes=["penstock"])
    with suppress(ImportError, SyntaxError, OSError, ValueError):
        finder.import_hook(name)
    for found, module in sorted(finder.modules.items()):
        if (file := getattr(module, "__file__", None)) is not None:
            yield f"{found}.py", Path(file)


def _local(source: str) -> Path | None:
    """The path that `source` is, if it is one: there need be nothing."""
    text = source.removeprefix("file://")
    return None if "://" in text else Path(os.path.expanduser(text)).absolute()


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        items = cast("Mapping[Any, Any]", value).values() if isinstance(value, Mapping) else value
        for item in cast("list[Any]", items):
            yield from _texts(item)


def _version(file: Path) -> str:
    status = file.stat()
    if status.st_size > _CONTENT_BYTES:
        return f"{status.st_size} bytes, changed at {status.st_mtime_ns / 1e9:.6f}"
    return _digest(file.read_bytes())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def adapter_name(given: str, lora: LoraConfig) -> str:
    """The name of an adapter; `org--name` for the id `org/name` on the hub."""
    return given if downloader(lora) is None else given.replace("/", _SLASH)


def downloader(lora: LoraConfig) -> type[AdapterDownloader] | None:
    """Downloads adapters that rows name by their ids on the hub; None where the config names their sources.

    Only in batch, whose rows are the user's: clients of a service could make it download anything.
    """
    return None if lora.dynamic_lora_loading_path or lora.adapters else HubDownloader


class HubDownloader(AdapterDownloader):
    """Takes an adapter's name for its id on the hub."""

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Any:
        return super().load_model_from_config(lora_model_id, _with_source(lora_model_id, llm_config))

    def stamp(self, lora_model_id: str, llm_config: LLMConfig) -> str:
        return super().stamp(lora_model_id, _with_source(lora_model_id, llm_config))


def _with_source(lora_model_id: str, config: LLMConfig) -> LLMConfig:
    assert config.lora_config is not None
    name = lora_model_id.removeprefix(f"{config.model_id}:")
    adapters = {name: f"hf://{name.replace(_SLASH, '/', 1)}"}
    return config.model_copy(
        update={"lora_config": config.lora_config.model_copy(update={"adapters": adapters})}
    )
