"""Will each model of a plan load, and does it fit: asked of `preflight`, and shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from penstock.cli.models.engine_arguments import quick_values
from penstock.cli.models.plan import ServePlan
from penstock.config import LLMConfig
from penstock.config.derive.prefill import halves
from penstock.preflight import start
from penstock.preflight.devices import GIB, Devices
from penstock.preflight.examine import Examined
from penstock.preflight.fit import MemoryFit


def examined(
    plan: ServePlan, planned: Devices | None = None, *, ask_hub: bool = False
) -> Iterator[tuple[LLMConfig, Examined]]:
    """What can be said of each model of the plan; arguments as of `start.examined`.

    Raises: ConfigError for a value of `plan.engine_words` that cannot be read.
    """
    given = quick_values(plan.engine_words)
    for config in (half for one in plan.configs for half in halves(one)):
        if (found := start.examined(config, given, planned, ask_hub=ask_hub)) is not None:
            yield config, found


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
