"""Validates adapters on disk, in PEFT's format, before an engine reads them.

An engine that loads a broken adapter may crash, or accept one of another model and produce nonsense. Nothing
here loads a tensor: a header is a few kilobytes. Imports no engine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.engine import plain_name
from penstock.engines.weights import Broken, Shapes, shapes
from penstock.errors import AdapterBroken, ModelNotFound

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = ("adapter_model.bin", "adapter_model.pt")
"""Left to the engine: their shapes are not cheap to read."""

_LORA = re.compile(r"^(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight$")


NO_ROOM = "This engine was started without room for adapters: its config has no lora_config."


def not_loaded(name: str) -> ModelNotFound:
    """The error about an adapter that a request names."""
    return ModelNotFound(f"The adapter '{plain_name(name)}' is not loaded.", param="model")


def refusal(name: str, why: str) -> AdapterBroken:
    """The error about an adapter that an engine does not take."""
    return AdapterBroken(
        f"The adapter '{plain_name(name)}' cannot be loaded: {why.rstrip('.')}.", param="model"
    )


def declared(folder: Path) -> dict[str, Any]:
    """The contents of `adapter_config.json`. Raises: Broken."""
    try:
        said = json.loads((folder / CONFIG).read_bytes())
    except OSError as error:
        raise Broken(f"it has no readable {CONFIG}") from error
    except (ValueError, RecursionError) as error:
        raise Broken(f"its {CONFIG} is no JSON") from error
    if not isinstance(said, dict):
        raise Broken(f"its {CONFIG} holds no mapping")
    return cast("dict[str, Any]", said)


def check(folder: Path, max_rank: int, base: Shapes) -> None:
    """base: tensors of the base model, by name; empty where unknown.

    Raises: Broken with the first problem.
    """
    config = declared(folder)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise Broken(f"its peft_type is {kind!r}, and only 'LORA' can be served")
    rank = _rank(config)
    if rank > max_rank:
        raise Broken(
            f"its rank is {rank}, and this model takes at most {max_rank}; "
            "raise `max_lora_rank` of engine_kwargs"
        )
    if (folder / WEIGHTS).is_file():
        _check_tensors(_lora(shapes(folder / WEIGHTS)), config, base)
    elif not any((folder / name).is_file() for name in _PICKLED):
        raise Broken(f"it has no {WEIGHTS}")


def _rank(config: Mapping[str, Any]) -> int:
    """The highest rank that any layer may have."""
    pattern = config.get("rank_pattern") or {}
    more: list[Any] = [*cast("dict[str, Any]", pattern).values()] if isinstance(pattern, dict) else [None]
    ranks: list[Any] = [config.get("r"), *more]
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise Broken(f"its {CONFIG} gives no rank `r`")
    return max(ranks)


def _rank_of(layer: str, config: Mapping[str, Any]) -> int:
    """By the first pattern that fits the end of its name, as in PEFT. The strength follows from it."""
    pattern: Mapping[str, int] = config.get("rank_pattern") or {}
    fitting = (rank for name, rank in pattern.items() if re.fullmatch(rf"(.*\.)?({name})", layer))
    try:
        return next(fitting, config["r"])
    except re.error as error:
        raise Broken(f"the rank_pattern of its {CONFIG} has a faulty expression ({error})") from error


def _lora(found: Shapes) -> dict[str, dict[str, tuple[int, ...]]]:
    """Shapes of A and B by the layer's name in the base model."""
    layers: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in found.items():
        if match := _LORA.match(name):
            layers.setdefault(match[1], {})[match[2]] = shape
    if not layers:
        raise Broken(f"its {WEIGHTS} holds no LoRA tensors")
    return layers


def _check_tensors(
    layers: Mapping[str, Mapping[str, tuple[int, ...]]], config: Mapping[str, Any], base: Shapes
) -> None:
    kinds = {_kind(name) for name in base}
    for layer, parts in layers.items():
        a, b = parts.get("A"), parts.get("B")
        if a is None or b is None:
            raise Broken(f"its tensors for {layer} are not a pair of lora_A and lora_B")
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise Broken(f"its lora_A {list(a)} and lora_B {list(b)} for {layer} do not fit together")
        rank = _rank_of(layer, config)
        if a[0] != rank:
            raise Broken(f"its {CONFIG} says rank {rank}, its tensors for {layer} have rank {a[0]}")
        here = base.get(f"{layer}.weight")
        if here is None and _kind(f"{layer}.weight") in kinds:
            raise Broken(f"it was made for another model: this one has no {layer}")
        if here not in (None, (b[0], a[1])):
            raise Broken(
                f"it was made for another model: its change of {layer} is for a matrix of {b[0]} x {a[1]}, "
                f"and here that is {' x '.join(map(str, here))}"
            )


def _kind(name: str) -> str:
    """Equal for the same layer of each block. A kind that the base lacks may only have another name there,
    from another version of transformers, or be tied to another layer: that is left to the engine.
    """
    return re.sub(r"\d+", "#", name)
