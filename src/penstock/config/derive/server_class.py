"""Users' classes that a config names by import path. Only this file imports them."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.config.messages.location import Location
from penstock.config.schema.model import LLMConfig


def server_class(config: LLMConfig, default: type[Any]) -> type[Any]:
    """The class of a model's replicas: what `server_cls` names, else `default`.

    Raises: ConfigError when it cannot be imported.
    """
    return imported_class(config.server_cls, config.location / "server_cls") or default


def imported_class(given: Any, where: Location) -> type[Any] | None:
    """The class that `given` is, or the path of. Raises: ConfigError when it cannot be imported."""
    if given is None or isinstance(given, type):
        return given
    module, _, name = given.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise where.fault(f"{given!r} cannot be imported: {error}.") from error
    if not isinstance(found, type):
        raise where.fault(f"{given!r} is not a class.")
    return found
