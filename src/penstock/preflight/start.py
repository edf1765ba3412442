"""What would stop the start of a config's model on this machine, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from os.path import expanduser, isdir
from pathlib import Path
from typing import Any

from penstock.config import LLMConfig, LLMServingArgs, Settings, accelerator_kind
from penstock.config.messages.location import Location
from penstock.config.messages.problems import config_error, nearest
from penstock.engines.vllm.arguments.defaults import Shape, with_defaults
from penstock.errors import ConfigError, Error
from penstock.preflight.devices import Devices, devices_here, parse_devices
from penstock.preflight.examine import Examined, examine
from penstock.preflight.files import ModelFiles
from penstock.preflight.loading import Mistake

_OTHER_ENVIRONMENTS = ("pip", "uv", "conda", "container", "image_uri", "py_executable")


def refuse(config: LLMConfig) -> None:
    """Raises: ConfigError for a folder that is not here, and for what would certainly end the start."""
    problems = missing_folders(config)
    if not problems and (found := examined(config)) is not None:
        problems = certain(config, found)
    if problems:
        raise config_error(dict.fromkeys(problems))


def examined(
    config: LLMConfig,
    given: Mapping[str, Any] | None = None,
    planned: Devices | None = None,
    *,
    ask_hub: bool = False,
) -> Examined | None:
    """What can be said of a model that vLLM runs: in a folder, or with `ask_hub` on the hub; None of others.

    given: more arguments of the engine. planned: GPUs in place of those that the config names, or that are
    here.
    """
    own = config.server_cls or config.callback_config.callback_class or Settings.read().engine_cls
    source = config.model_source.removeprefix("file://")
    asked = ask_hub and "://" not in source and not source.startswith(("/", ".", "~"))
    if own or config.engine_name != "vllm" or not (asked or isdir(expanduser(source))):
        return None
    lora = config.lora_config.dynamic_lora_loading_path if config.lora_config else None
    adapters = Path(expanduser(str(lora).removeprefix("file://"))).glob("*/adapter_config.json")
    found = sorted(file.parent for file in adapters) if lora else []
    try:
        files = ModelFiles.at(source)
    except Error as error:  # it may be there when the model starts, and be here on the nodes
        unsure = error.facts.get("retryable")
        return Examined((str(error) if unsure else Mistake(str(error), certain=False),))
    return examine(files, _arguments(config, given or {}), planned or _devices(config), found)


def certain(config: LLMConfig, found: Examined) -> list[str]:
    """Sentences for what would certainly end its start in this environment."""
    if brings_its_own(config):
        return []
    return [said(config, mistake) for mistake in found.mistakes if mistake.certain]


def brings_its_own(config: LLMConfig) -> bool:
    """Whether its environment is another one than this, perhaps with another engine."""
    return any(name in (config.runtime_env or {}) for name in _OTHER_ENVIRONMENTS)


def _arguments(config: LLMConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments as they will be on a GPU."""
    tokenizer = config.model_loading_config.tokenizer_source
    own = {"tokenizer": tokenizer} if tokenizer else {}
    return with_defaults({**config.engine_kwargs, **own, **given}, replace(Shape.of(config), cpu=False))


def _devices(config: LLMConfig) -> Devices | None:
    """As many as it takes of the type that the config names; else those here, where it uses them."""
    if accelerator_kind(config) == "cpu":
        return None
    try:
        named = config.accelerator_type and parse_devices(config.accelerator_type, Settings.read().gpus)
    except ConfigError:
        named = None  # Ray's name of a GPU that the table lacks
    return replace(named, count=1 << 20) if named else devices_here()


def said(config: LLMConfig, mistake: Mistake) -> str:
    """The mistake as a sentence that begins with where it is: in a file, or in the words of a command."""
    if config.location.lines and mistake.argument:
        return (config.location / "engine_kwargs" / mistake.argument).says(mistake.text)
    if mistake.argument:
        return f"--{mistake.argument.replace('_', '-')}: {mistake.text}"
    where = config.location if config.location.lines else Location()
    return where.says(f"{config.model_source}: {mistake.text}")


def faults_of_storage(serving: LLMServingArgs) -> list[str]:
    """A sentence for `jobs.storage` with a protocol that there is not."""
    url = serving.jobs and serving.jobs.storage
    if not url or "://" not in url:
        return []
    from penstock.sources.fsspec_store import unknown_protocol  # takes a moment

    if (name := unknown_protocol(url)) is None:
        return []
    wrong = f"unknown protocol {name!r}. Name a folder, or a URL such as s3://bucket/x."
    return [(serving.location / "jobs" / "storage").says(wrong)]


def missing_folders(config: LLMConfig) -> list[str]:
    """A sentence for each folder of this machine that the config names and that is not there.

    None where nothing reads it, or the user's own code may make it.
    """
    shadow = config.version and config.version.shadow
    if shadow and shadow.answers and not isdir(folder := Path(shadow.answers).parent):
        where = config.location
        is_entry = where.path[-2:-1] == ("versions",)
        where = replace(where, path=where.path[:-2]) if is_entry else where / "version"
        return [(where / "shadow" / "answers").says(f"'{folder}' is no folder of this machine.")]
    if config.server_cls is not None or config.callback_config.callback_class is not None:
        return []
    loading, lora = config.model_loading_config, config.lora_config
    adapters = lora.dynamic_lora_loading_path if lora else None
    named: dict[tuple[str, str], Any] = {("lora_config", "dynamic_lora_loading_path"): adapters}
    if config.engine_name != "sim":
        named["model_loading_config", "model_source"] = config.model_source
        named["model_loading_config", "tokenizer_source"] = loading.tokenizer_source
    paths = {
        field: Path(expanduser(source.removeprefix("file://")))
        for field, source in named.items()
        if isinstance(source, str) and source.startswith(("/", "./", "../", "~", "file://"))
    }
    return [
        (config.location / section / field).says(f"'{path}' {why}")
        for (section, field), path in paths.items()
        if (why := _unread(path))
    ]


def _unread(path: Path) -> str | None:
    """Why nothing can be read there, and the folder beside it that was probably meant."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        with suppress(OSError):
            guess = nearest(path.name, [one.name for one in path.parent.iterdir() if one.is_dir()])
            if guess:
                return f"does not exist on this machine. Did you mean '{path.parent / guess}'?"
        return "does not exist on this machine."
    except OSError as error:  # in a folder that is closed to this user, or with a name that is too long
        return f"cannot be read: {error.strerror}."
    return None
