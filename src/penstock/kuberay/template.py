"""The parts of `manifest.yaml`, with values in place of its `$words`."""

from __future__ import annotations

import string
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, cast

import yaml

_PARTS: dict[str, Any] = yaml.safe_load(files("penstock.kuberay").joinpath("manifest.yaml").read_text())


def part(name: str, /, **values: Any) -> Any:
    """The part of this name. A `$word` is one of `values`, else another part with the same values."""
    return _filled(_PARTS[name], values)


def _filled(given: Any, values: Mapping[str, Any]) -> Any:
    """None for what is left out."""
    match given:
        case dict():
            entries = cast("dict[str, Any]", given).items()
            found = {name: _filled(value, values) for name, value in entries}
            if not found.pop("$if", True):
                return None
            return {name: value for name, value in found.items() if value is not None}
        case list():
            items = [_filled(item, values) for item in cast("list[Any]", given)]
            return [item for item in items if item is not None] or None
        case str() if given.startswith("$") and given[1:] in values:
            return values[given[1:]]
        case str() if given.startswith("$") and given[1:] in _PARTS:
            return part(given[1:], **values)
        case str():
            return string.Template(given).substitute(values)
        case _:
            return given
