"""Everything that can be said of a model before a start: what is wrong, what is not known, what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engines.weights import Broken, check
from penstock.preflight import loading
from penstock.preflight.devices import Devices
from penstock.preflight.files import ModelFiles
from penstock.preflight.fit import MemoryFit, dtype_of, fit
from penstock.preflight.loading import Mistake
from penstock.preflight.model import ModelSize
from penstock.preflight.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Examined:
    """said: mistakes, and as plain texts what users should know and what is not known."""

    said: tuple[Mistake | str, ...]
    model: ModelSize | None = None
    fit: MemoryFit | None = None

    @property
    def mistakes(self) -> list[Mistake]:
        return [one for one in self.said if isinstance(one, Mistake)]

    @property
    def notices(self) -> list[str]:
        return [one for one in self.said if isinstance(one, str)]


def examine(
    files: ModelFiles, arguments: Mapping[str, Any], devices: Devices | None, adapters: Sequence[Path] = ()
) -> Examined:
    """arguments: the engine's, under vLLM's names. What a file says that makes no sense is not known."""
    try:
        return _examined(files, arguments, devices, adapters)
    except Exception as error:  # config.json may say anything, and the engine may know what it means
        return Examined(
            (f"not known: what it takes; its files say what is not understood here ({error!r:.200}).",)
        )


def _examined(
    files: ModelFiles, arguments: Mapping[str, Any], devices: Devices | None, adapters: Sequence[Path]
) -> Examined:
    said: list[Mistake | str] = []
    try:
        config = files.read("config.json")
    except ValueError:
        return Examined((Mistake("config.json is no valid JSON. Copy or download it again."),))
    if not config:
        return Examined((loading.without_config(files),))
    overrides, runner = arguments.get("hf_overrides"), str(arguments.get("runner"))
    for name, value in overrides.items() if isinstance(overrides, Mapping) else ():
        both = isinstance(value, Mapping) and isinstance(config.get(name), Mapping)
        config[name] = {**config[name], **value} if both else value
    try:
        model = ModelSize.of(config, pooling={"pooling": True, "generate": False}.get(runner))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return Examined((f"not known: what it takes; its config.json does not say {error}.",))
    sizes, found = Sizes.of(arguments), None
    said += loading.of_sizes(model, sizes)
    said += loading.of_files(files, model, arguments)
    said += loading.of_template(files, model, arguments)
    said += [f"not known: {text}." for text in model.unknown]
    said += loading.of_devices(sizes, devices) if devices else []
    try:
        from_files = arguments.get("load_format") in (None, "auto", "hf", "safetensors")
        if from_files and files.tensors:
            check(files.folder)
        said += loading.of_adapters(files, sizes.max_lora_rank, adapters)
        if weights := files.weights(model, dtype_of(model, sizes, devices)):
            found = fit(model, weights, sizes, devices)
            lacking = loading.of_fit(found)
            said += (one.text for one in lacking) if model.unknown else lacking
        elif from_files:
            said.append(Mistake("there are no weights. Copy or download them.", certain=False))
        else:
            said.append("not known: the weights; there are none here.")
    except Broken as broken:
        said.append(Mistake(f"{broken}."))
    except (ValueError, KeyError) as error:
        said.append(f"not known: {error}.")
    return Examined(tuple(said), model, found)
