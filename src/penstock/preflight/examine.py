"""Everything that can be said of a model before a start: what is wrong, what is not known, what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.weights import Broken, check
from penstock.preflight import loading
from penstock.preflight.devices import Devices
from penstock.preflight.files import ModelFiles
from penstock.preflight.fit import Fit, dtype_of, fit
from penstock.preflight.loading import Mistake
from penstock.preflight.model import Model
from penstock.preflight.sizes import Sizes

_READ_AS_IT_IS = (None, "auto", "hf", "safetensors")


@dataclass(frozen=True, slots=True)
class Examined:
    """notices: what users should know, and what is not known; no faults."""

    model: Model | None = None
    fit: Fit | None = None
    mistakes: tuple[Mistake, ...] = ()
    notices: tuple[str, ...] = ()


def examine(
    files: ModelFiles, arguments: Mapping[str, Any], devices: Devices | None, adapters: Sequence[Path] = ()
) -> Examined:
    """arguments: the engine's, under vLLM's names."""
    try:
        config = files.read("config.json")
    except ValueError:
        return Examined(mistakes=(Mistake("config.json is no valid JSON. Copy or download it again."),))
    if not config:
        return _without_config(files)
    overrides, runner = arguments.get("hf_overrides"), {"pooling": True, "generate": False}
    if isinstance(overrides, Mapping):
        config |= overrides
    try:
        model = Model.of(config, pooling=runner.get(arguments.get("runner") or ""))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return Examined(notices=(f"not known: what it takes; its config.json does not say {error}.",))
    said = [*_said(files, model, arguments, devices, adapters)]
    found = next((one for one in said if isinstance(one, Fit)), None)
    if found:
        said += loading.of_fit(found)
    mistakes = tuple(one for one in said if isinstance(one, Mistake))
    return Examined(model, found, mistakes, tuple(one for one in said if isinstance(one, str)))


def _said(
    files: ModelFiles,
    model: Model,
    arguments: Mapping[str, Any],
    devices: Devices | None,
    adapters: Sequence[Path],
) -> Iterator[Mistake | str | Fit]:
    sizes = Sizes.of(arguments)
    yield from loading.of_sizes(model, sizes)
    yield from loading.of_files(files, model, arguments)
    yield from (f"not known: {text}." for text in model.unknown)
    if (
        not model.pooling
        and model.model_type != "whisper"
        and (said := loading.of_template(files, arguments))
    ):
        yield said
    if devices:
        yield from loading.of_devices(sizes, devices)
    try:
        if arguments.get("load_format") in _READ_AS_IT_IS and files.tensors:
            check(files.folder)
        weights = files.weights(model, dtype_of(model, sizes, devices))
        shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
        yield from loading.of_adapters(adapters, sizes.max_lora_rank, shapes)
        yield (
            fit(model, weights, sizes, devices) if weights else "not known: the weights; there are none here."
        )
    except Broken as broken:
        yield Mistake(f"{broken}.")
    except (ValueError, KeyError) as error:
        yield f"not known: {error}."


def _without_config(files: ModelFiles) -> Examined:
    if any(name == "params.json" or name.endswith(".gguf") for name in files.sizes):
        return Examined(notices=("not known: what it takes; it has no config.json.",))
    inner = sorted(file.parent for file in files.folder.glob("*/config.json"))
    hint = f" Did you mean {inner[0]}?" if inner else " Copy or download the model again."
    return Examined(mistakes=(Mistake(f"it has no config.json, so it is no model.{hint}"),))
