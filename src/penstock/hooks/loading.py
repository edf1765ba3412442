"""Loads a hook from its name in a config: imports it, and instantiates a class."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.config.derive.serve_options import runtime_env
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import LLMConfig

PREPROCESSOR, POSTPROCESSOR = "preprocessor", "postprocessor"

_CODE = {"working_dir", "py_modules", "py_executable", "pip", "uv", "conda", "image_uri", "container"}
"""Keys of a runtime_env that make other modules importable."""


def made(config: LLMConfig, field: str) -> Callable[..., Any]:
    """The callable of `field`; a class is instantiated with its `arguments` and, if it takes one, the
    `llm_config`.

    Raises: ConfigError with its place when it cannot be imported or created.
    """
    try:
        found, given = _resolved(config, field)
        return found(**given) if isinstance(found, type) else found
    except Exception as error:  # runs the user's code
        fault = f"{_shown(getattr(config, field))} cannot be made: {_why(error)}."
        raise ConfigError((config.location / field).says(fault)) from error


def problems(config: LLMConfig) -> list[str]:
    """A sentence, with its place, for every hook that cannot be found, created or called. Creates none.

    What a runtime_env brings to the replicas need not be here.
    """
    found: list[str] = []
    for field in (PREPROCESSOR, POSTPROCESSOR):
        if (named := getattr(config, field)) is None:
            continue
        try:
            _resolved(config, field)
        except Exception as error:  # runs the user's code
            if isinstance(error, ImportError) and _brings_code(config, field):
                continue  # it may exist when the replica starts; if not, that is reported then
            found.append((config.location / field).says(f"{_shown(named)} cannot be used: {_why(error)}."))
    return found


def takes_two(ask: Callable[..., Any]) -> bool:
    """Whether it takes the context, too."""
    kinds = [parameter.kind for parameter in inspect.signature(ask).parameters.values()]
    places = [kind for kind in kinds if kind in (inspect.Parameter.POSITIONAL_ONLY, _PLACED)]
    return len(places) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds


_PLACED = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _brings_code(config: LLMConfig, field: str) -> bool:
    actor = (getattr(config, f"{field}_options") or {}).get("ray_actor_options") or {}
    return not _CODE.isdisjoint({**runtime_env(config), **(actor.get("runtime_env") or {})})


def _resolved(config: LLMConfig, field: str) -> tuple[Any, dict[str, Any]]:
    """The hook of `field`, and the constructor arguments of a class. Raises: what is wrong with it."""
    found = getattr(config, field)
    if isinstance(found, str):
        module, _, name = found.partition(":")
        found = getattr(importlib.import_module(module), name)
    options: Mapping[str, Any] = getattr(config, f"{field}_options") or {}
    given = _given(found, options.get("arguments", {}), config)
    _check(found, given)
    return found, given


def _given(found: Any, arguments: Mapping[str, Any], config: LLMConfig) -> dict[str, Any]:
    """Constructor arguments of a class."""
    if not isinstance(found, type):
        if arguments:
            raise TypeError("`arguments` are for a class, and this is none")
        return {}
    wants = "llm_config" in inspect.signature(found).parameters and "llm_config" not in arguments
    return {**arguments, **({"llm_config": config} if wants else {})}


def _check(found: Any, given: Mapping[str, Any]) -> None:
    """Raises: TypeError for what cannot be created with `given`, or called with a request."""
    called = found
    if isinstance(found, type):
        inspect.signature(found).bind(**given)
        called = next((vars(kind)["__call__"] for kind in found.__mro__ if "__call__" in vars(kind)), None)
        if called is None:
            raise TypeError("it has no method `__call__(self, request)`")
    elif not callable(found):
        raise TypeError("it is not callable")
    for code in (called, getattr(called, "__call__", None)):  # noqa: B004 - of an object that is called
        if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
            raise TypeError("it yields; it must return one value")
    _check_places(called, 1 if isinstance(found, type) else 0)


def _check_places(called: Any, before: int) -> None:
    """before: leading parameters that the caller does not fill, such as `self`."""
    signature = inspect.signature(called)
    for count in (1, 2):
        try:
            signature.bind(*[None] * (before + count))
            return
        except TypeError:
            continue
    raise TypeError(f"it takes {signature}; it must take (request) or (request, context)")


def _shown(named: Any) -> str:
    return repr(named) if isinstance(named, str) else getattr(named, "__name__", repr(named))


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
