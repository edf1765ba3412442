"""Will each model of a plan load, and does it fit: asked of `preflight`, and shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from penstock.cli.models.engine_arguments import quick_values
from penstock.cli.models.plan import ServePlan
from penstock.config import LLMConfig, Settings, accelerator_kind
from penstock.config.derive.prefill import halves
from penstock.config.messages.location import Location
from penstock.engines.vllm.arguments.defaults import Shape, with_defaults
from penstock.errors import ConfigError, Error
from penstock.preflight import Devices, Examined, MemoryFit, Mistake, ModelFiles, examine
from penstock.preflight.devices import GIB, devices_here, parse_devices


def examined(
    plan: ServePlan, planned: Devices | None = None, *, ask_hub: bool = False
) -> Iterator[tuple[LLMConfig, Examined]]:
    """What can be said of each model that vLLM runs: of those in folders, and with `ask_hub` on the hub.

    planned: GPUs in place of those that the config names, or that are here.
    Raises: ConfigError for a value of `plan.engine_words` that cannot be read.
    """
    given = quick_values(plan.engine_words)
    for config in (half for one in plan.configs for half in halves(one)):
        own = config.server_cls or config.callback_config.callback_class or Settings.read().engine_cls
        source = config.model_source.removeprefix("file://")
        asked = ask_hub and "://" not in source and not source.startswith(("/", ".", "~"))
        if own or config.engine_name != "vllm" or not (asked or Path(source).expanduser().is_dir()):
            continue
        lora = config.lora_config.dynamic_lora_loading_path if config.lora_config else None
        adapters = Path(str(lora).removeprefix("file://")).expanduser().glob("*/adapter_config.json")
        found = sorted(file.parent for file in adapters) if lora else []
        try:
            files = ModelFiles.at(source)
        except Error as error:  # it may be there when the model starts, and be here on the nodes
            unsure = error.facts.get("retryable")
            yield config, Examined((str(error) if unsure else Mistake(str(error), certain=False),))
        else:
            yield config, examine(files, _arguments(config, given), planned or _devices(config), found)


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


def rows(found: Examined) -> Iterator[tuple[str, str]]:
    """Names and texts, in the order in which a reader asks for them."""
    if (fit := found.fit) is None:
        return
    if fit.devices:
        share = fit.sizes.gpu_memory_utilization
        yield "on", f"{fit.sizes.gpus} x {fit.devices.each}, gpu_memory_utilization {share:g}"
    yield "weights", f"{_size(fit.weights_bytes)}{'' if fit.exact else ', about'}"
    if fit.adapters_bytes:
        yield "adapters", f"{_size(fit.adapters_bytes)}, estimated"
    if fit.devices:
        yield "reserve", f"{_size(fit.reserve_bytes)}, estimated: activations, CUDA graphs, the driver"
    yield "KV cache", _cache(fit)


def _cache(fit: MemoryFit) -> str:
    if (pool := fit.pool) is None:
        return "none: it keeps nothing of a request"
    sizes = {"token": pool.token_bytes, "request": pool.state_bytes}
    each = " and ".join(f"{size / 1024:,.4g} KiB a {what}" for what, size in sizes.items() if size)
    if fit.devices is None:
        return f"{each}; {_size(fit.request_bytes)} of one request of {fit.context:,} tokens"
    return f"{_size(fit.cache_bytes)} at {each}: {fit.tokens:,} tokens; {fit.full}"


def _size(size_bytes: int) -> str:
    unit = GIB if abs(size_bytes) >= GIB // 10 else 1 << 20
    return f"{size_bytes / unit:.1f} {'GiB' if unit == GIB else 'MiB'}"


def as_json(config: LLMConfig, found: Examined) -> dict[str, Any]:
    """What `--json` prints of one model. Sizes are bytes on each GPU."""
    shown: dict[str, Any] = {"model": config.model_id, "source": config.model_source}
    if (fit := found.fit) is None:
        return shown
    names = ("dtype", "context", "weights_bytes", "exact", "request_bytes")
    of_gpu = ("adapters_bytes", "reserve_bytes", "cache_bytes", "tokens", "requests", "lacking_bytes", "ways")
    shown |= {name: getattr(fit, name) for name in (*names, *(of_gpu if fit.devices else ()))}
    shown |= {name: getattr(fit.pool, name, 0) for name in ("token_bytes", "state_bytes")}
    gpus = {"gpus": asdict(fit.devices)} if fit.devices else {}
    return shown | {"architecture": found.model and found.model.architecture, **gpus}
