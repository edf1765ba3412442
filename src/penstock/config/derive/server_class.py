"""The class of a model's replicas. Only this file imports the user's."""

from __future__ import annotations

import importlib
from typing import Any

from penstock.config.schema.model import LLMConfig
from penstock.errors import ConfigError


def server_class(config: LLMConfig, default: type[Any]) -> type[Any]:
    """The class that `server_cls` names, else `default`.

    Raises: ConfigError when it cannot be imported.
    """
    given = config.server_cls
    if given is None or isinstance(given, type):
        return given or default
    module, _, name = given.replace(":", ".").rpartition(".")
    where = config.location / "server_cls"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(where.says(f"{given!r} cannot be imported: {error}.")) from error
    if not isinstance(found, type):
        raise ConfigError(where.says(f"{given!r} is not a class."))
    return found
