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
from penstock.preflight.model import ModelSize, NotKnown
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
    """arguments: the engine's, under vLLM's names. What the files say and is not understood is not known."""
    said: list[Mistake | str] = []
    model = found = None
    try:
        config = files.read("config.json")
    except ValueError:
        return Examined((Mistake("config.json is no valid JSON. Copy or download it again."),))
    except OSError as error:
        text = f"config.json cannot be read: {error.strerror}. Give this user the right to, or copy it."
        return Examined((Mistake(text),))
    if not config:
        return Examined((loading.without_config(files),))
    said += (refused := [*loading.of_values(arguments)])
    arguments = {
        name: value for name, value in arguments.items() if name not in {one.argument for one in refused}
    }
    try:
        runner = str(arguments.get("runner"))
        config = _overridden(config, arguments.get("hf_overrides"))
        model = ModelSize.of(config, pooling={"pooling": True, "generate": False}.get(runner))
        sizes = Sizes.of(arguments)
        said += loading.of_sizes(model, sizes)
        said += loading.of_files(files, model, arguments)
        said += loading.of_template(files, model, arguments)
        said += [f"not known: {text}." for text in model.unknown]
        said += loading.of_devices(sizes, devices) if devices else []
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
    except NotKnown as error:
        said.append(f"not known: {error}.")
    except Exception as error:  # config.json may say anything, and the engine may know what it means
        said.append(f"not known: what it takes; its config.json is not understood here ({error!r:.200}).")
    return Examined(tuple(said), model, found)


def _overridden(config: Mapping[str, Any], overrides: Any) -> dict[str, Any]:
    """As `hf_overrides` does; a mapping inside is overridden in part."""
    changed = dict(config)
    for name, value in overrides.items() if isinstance(overrides, Mapping) else ():
        inner = changed.get(name)
        changed[name] = (
            {**inner, **value} if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
        )
    return changed
