"""From a config with `versions` to one config for each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from penstock.config.messages.location import Location
from penstock.config.messages.problems import described
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.versions import VersionConfig, own_fields

_OF_MODEL = ("versions", "sticky", "canary", "shadow")
SHARED = (*_OF_MODEL, "aliases", "fallbacks", "version")
"""Fields that a version cannot have of its own."""


def with_versions(config: LLMConfig, location: Location) -> list[LLMConfig]:
    """The config itself, if it has no versions.

    A version without fields of its own is the model as it runs without versions: its id is the model's.
    That of another one is `qwen@b`. All know the model's names. Raises: ConfigError.
    """
    if not config.versions:
        return [config]
    given = {name: getattr(config, name) for name in config.model_fields_set if name not in _OF_MODEL}
    return [
        _version(config, given, entry, location / "versions" / i) for i, entry in enumerate(config.versions)
    ]


def _version(
    config: LLMConfig, given: Mapping[str, Any], entry: dict[str, Any], location: Location
) -> LLMConfig:
    own, model = own_fields(entry), config.model_id
    for name in own:
        if name in SHARED:
            raise (location / name).fault(f"{name} belongs to the model; write it above `versions`.")
    loading, where = _plain(own.get("model_loading_config", {})), location / "model_loading_config"
    if not isinstance(loading, Mapping):
        raise where.fault(f"is {described(loading)}; must be a mapping.")
    if "model_id" in loading:
        raise (where / "model_id").fault(f"a version of {model!r} is named by `name`; leave model_id out.")
    version = VersionConfig(
        of=model,
        name=entry["name"],
        weight=entry.get("weight", 1.0),
        sticky=config.sticky,
        **{
            name: part
            for name in ("canary", "shadow")
            if (part := getattr(config, name)) is not None and part.version == entry["name"]
        },
    )
    others = [model if own else version.full_name, *config.aliases]
    values = {name: _over(value, own[name]) if name in own else value for name, value in given.items()}
    values = {**own, **values, "aliases": others, "version": version}
    if own:
        named = {"model_id": version.full_name}
        values["model_loading_config"] = {
            "model_source": config.model_source,
            **_plain(values["model_loading_config"]),
            **named,
        }
    return LLMConfig.parse(values, location)


def _over(before: Any, after: Any) -> Any:
    """A mapping replaces the keys that it has."""
    first, second = _plain(before), _plain(after)
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return {**first, **second}
    return after


def _plain(value: Any) -> Any:
    """A section as the mapping of what was set."""
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in value.model_fields_set}
    return value
