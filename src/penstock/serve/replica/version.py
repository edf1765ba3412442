"""Deployments and their versions. Serve keeps the replicas of one that is run again with the same version.

Serve's own versions are random for `serve.run`, so that every replica restarts. `serve deploy` replaces the
versions of all deployments by a hash of the application's arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import json
import logging
import random
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePath
from types import FunctionType
from typing import Any, cast

import ray
from pydantic import BaseModel, SecretStr
from ray import serve
from ray.serve import Deployment

from penstock import __version__
from penstock.config import LLMConfig
from penstock.config.derive.adapters import without_live_adapters
from penstock.errors import ConfigError
from penstock.serve.control import application

log = logging.getLogger(__name__)

_built: ContextVar[dict[str, str | None] | None] = ContextVar("built", default=None)
_OBEYED = {"version", "_internal"} <= inspect.signature(Deployment.options).parameters.keys()
_BESIDE = {
    *("aliases", "fallbacks", "version"),
    *("deployment_config", "routing_policy", "routing_config", "slo", "batch"),
    *("on_demand", "placement_group_config", "log_engine_metrics", "engine_start_timeout_s"),
}
"""Fields of a config that no answer depends on."""
_RELEASED = ("penstock", "ray", "builtins", "abc", "typing")  # packages whose code has versions of its own


def deployment(server: Any, options: Mapping[str, Any], made_of: Sequence[Any]) -> Deployment:
    """A class as a deployment of Serve, with these options.

    made_of: what its replicas are made of; when it is run again with the same, they stay.
    Raises: ConfigError for one that the installed Ray has not.
    """
    if unknown := ", ".join(sorted(name for name in options if not has_option(name))):
        raise ConfigError(
            f"Ray {ray.__version__}, which is installed here, has no deployment option {unknown}. Leave it "
            "out, or use a newer Ray."
        )
    decorate = cast(Any, serve.deployment)(**retrying(options))  # `Deployment.options` has not all of them
    made = versioned(decorate(server), made_of)
    if (versions := _built.get()) is not None:
        versions[made.name] = made.version
    return made


@contextmanager
def built() -> Generator[dict[str, str | None]]:
    """Versions of the deployments that are built inside, by name; None for those that restart each time."""
    found: dict[str, str | None] = {}
    token = _built.set(found)
    try:
        yield found
    finally:
        _built.reset(token)


def has_option(name: str) -> bool:
    """Whether deployments of the installed Ray have an option: some came after the oldest supported."""
    return name in inspect.signature(serve.deployment).parameters


def versioned(made: Deployment, made_of: Sequence[Any]) -> Deployment:
    """The deployment with a version that follows from `made_of`; Serve's where that cannot be compared."""
    try:
        version = hashed(made_of)
    except TypeError as error:
        log.info("Replicas of '%s' restart at each deployment: %s.", made.name, error)
        return made
    return made.options(version=version, _internal=True) if _OBEYED else made


def of_answers(config: LLMConfig) -> str:
    """Equal in replicas that give the same answers; "" for a config that cannot be compared."""
    config = without_live_adapters(config.canonical)
    fields = {name: getattr(config, name) for name in type(config).model_fields if name not in _BESIDE}
    try:
        return hashed([fields, named_code(config)])
    except TypeError as error:
        log.info("Streams of '%s' end with their replica: %s.", config.model_id, error)
        return ""


def hashed(made_of: Sequence[Any]) -> str:
    """Equal for equal values. Raises: TypeError for what cannot be compared."""
    text = json.dumps(_comparable([__version__, *made_of]), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def retrying(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of a deployment; if one of its name has failed, with an insignificant difference, because
    Serve would not try an equal one again.
    """
    if options.get("name") not in _failed(int(time.monotonic())):
        return options
    timeout_s = (options.get("health_check_timeout_s") or 30.0) * (1 + random.random() * 1e-6)
    return {**options, "health_check_timeout_s": timeout_s}


@functools.lru_cache(maxsize=1)
def _failed(second: int) -> frozenset[str]:
    """Names of deployments that have failed. second: the current one, so that a build asks Serve once."""
    applications = application.known().values() if ray.is_initialized() else ()
    deployments = (named for one in applications for named in one.deployments.items())
    return frozenset(name for name, one in deployments if one.status == "DEPLOY_FAILED")


def named_code(config: LLMConfig) -> list[str]:
    """`source` of the user's code that a config names by import path."""
    callback = config.callback_config.callback_class
    return [
        source(path)
        for path in (config.preprocessor, config.postprocessor, callback)
        if isinstance(path, str)
    ]


def source(path: str) -> str:
    """A hash of the file with the code at an import path; "" where this process has no such module."""
    return _source(path.replace(":", ".").rpartition(".")[0])


def _comparable(value: Any) -> Any:
    """Equal JSON for equal values. Raises: TypeError for an object whose state is not known."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case SecretStr():
            return value.get_secret_value()
        case bytes() | PurePath():
            return str(value)
        case BaseModel():
            fields = type(value).model_fields
            value = value.canonical if isinstance(value, LLMConfig) else value
            return _comparable({name: getattr(value, name) for name in fields})
        case Mapping():
            entries = cast("Mapping[Any, Any]", value)
            return {str(name): _comparable(entry) for name, entry in entries.items()}
        case list() | tuple():
            return [_comparable(entry) for entry in cast("Sequence[Any]", value)]
        case type():
            return [_code(part) for part in value.__mro__]
        case FunctionType() if value.__closure__ is None:
            return _code(value)
        case _ if dataclasses.is_dataclass(value):
            fields = [field.name for field in dataclasses.fields(value) if field.compare]
            return _comparable({name: getattr(value, name) for name in fields})
        case _:
            raise TypeError(f"{type(value).__qualname__} objects cannot be compared")


def _code(part: type | FunctionType) -> list[str]:
    """Its name, and a hash of the file where it is defined. Raises: TypeError without such a file."""
    name = [part.__module__, part.__qualname__]
    if part.__module__.partition(".")[0] in _RELEASED:
        return name
    if "<locals>" in part.__qualname__ or not (found := _source(part.__module__)):
        raise TypeError(f"the code of {part.__qualname__} is in no file, or inside a function")
    return [*name, found]


def _source(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        spec = importlib.util.find_spec(module) if file is None else None
        file = spec.origin if spec is not None and spec.has_location else file
        return hashlib.blake2b(Path(file).read_bytes()).hexdigest() if file else ""
    except (ImportError, ValueError, OSError):  # it comes with a runtime environment, or a notebook has it
        return ""
