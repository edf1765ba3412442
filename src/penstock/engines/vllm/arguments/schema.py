"""vLLM's own schema of its arguments: their names, and valid values.

`respond` uses it in a process of its own, because importing vLLM takes seconds and must not happen in the
user's; the engine itself uses `split`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, cast

import vllm.config
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from penstock.config.messages.location import Location, Path
from penstock.config.messages.problems import config_error, described, nearest, unknown
from penstock.config.messages.redact import is_secret
from penstock.config.messages.type_names import choices, describe, members, shape
from penstock.engines.vllm.arguments.check import is_opaque, located, to_json
from penstock.engines.vllm.arguments.names import HELP
from penstock.engines.vllm.arguments.refused import REFUSED

if find_spec("vllm.entrypoints.launchers.cli_args") is None:  # from vLLM 0.33 on
    from vllm.entrypoints.common import cli_args  # pyright: ignore[reportAttributeAccessIssue]
else:
    from vllm.entrypoints.launchers import cli_args

Fault = tuple[Path, str]

_SPECULATIVE = "speculative_config"


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument: its type, its limits, and its default."""

    annotation: Any
    limits: tuple[Any, ...] = ()
    default: Any = None

    def faults(self, value: Any) -> list[Fault]:
        """What is wrong with `value`; paths start inside the argument."""
        if isinstance(self.annotation, str) or (value is None and self.default is None) or is_opaque(value):
            return []
        if isinstance(value, str) and value.upper() in members(self.annotation):
            return []  # pydantic knows members by value, vLLM by name in any case
        try:
            self.adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            inner = shape(self.annotation)
            if inner is not None and isinstance(value, Mapping):
                return _faults_inside(inner, error)
            return [((), self.misfit(value))]
        return []

    @functools.cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Pydantic's validator of this argument."""
        annotation: Any = Annotated[self.annotation, *self.limits] if self.limits else self.annotation
        try:
            return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticUserError:  # a dataclass brings its own
            return TypeAdapter(annotation)

    def misfit(self, value: Any) -> str:
        """The message about a value of the wrong type or out of the limits."""
        guess = nearest(value, choices(self.annotation)) if isinstance(value, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        return f"is {described(value)}; must be {describe(self.annotation, self.limits)}.{hint}"


def _faults_inside(outer: type[Any], error: ValidationError) -> list[Fault]:
    """Pydantic's findings about one of vLLM's config classes, one per path."""
    found: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        path, argument, siblings = _locate(outer, detail["loc"])
        if detail["type"] == "unexpected_keyword_argument":
            name = str(detail["loc"][-1])
            found[*path, name] = unknown("key", name, siblings)
        elif argument is None or detail["type"] in ("value_error", "assertion_error"):
            words = detail["msg"].removeprefix("Value error, ").strip().splitlines()[0]
            found.setdefault(path, f"vLLM says: {words}")
        else:
            found.setdefault(path, argument.misfit(detail["input"]))
    return list(found.items())


def _locate(outer: type[Any], loc: Path) -> tuple[Path, Argument | None, Mapping[str, Argument]]:
    """The path without pydantic's marks of union branches, the argument there, and the fields inside it."""
    path: list[str | int] = []
    argument: Argument | None = None
    inside: Mapping[str, Argument] = _fields(outer)
    for part in loc:
        if part in inside:
            path.append(part)
            argument = inside[part]
            inner = shape(argument.annotation)
            inside = _fields(inner) if inner else {}
    return tuple(path), argument, inside


@functools.cache
def _fields(owner: type[Any]) -> dict[str, Argument]:
    """A dataclass's fields as arguments."""
    limits = _limits(owner)
    return {
        field.name: Argument(field.type, limits.get(field.name, ()), _default(field))
        for field in dataclasses.fields(owner)
        if field.init and not field.name.startswith("_")
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.MISSING
    return getattr(field.default, "default", field.default)  # pydantic's FieldInfo holds the default


def _limits(owner: type[Any]) -> dict[str, tuple[Any, ...]]:
    fields = cast("dict[str, Any]", getattr(owner, "__pydantic_fields__", {}))
    return {
        name: limits
        for name, info in fields.items()
        if (limits := tuple(mark for mark in info.metadata if isinstance(mark, Ge | Gt | Le | Lt)))
    }


@functools.cache
def engine_arguments() -> dict[str, Argument]:
    """AsyncEngineArgs' fields, with the limits of the config classes that they end in."""
    limits: dict[str, tuple[Any, ...]] = {}
    for owner in vars(vllm.config).values():
        # A draft model's sizes have limits of their own.
        if isinstance(owner, type) and dataclasses.is_dataclass(owner) and owner is not SpeculativeConfig:
            limits = _limits(owner) | limits
    own = _fields(AsyncEngineArgs).items()
    return {name: dataclasses.replace(argument, limits=limits.get(name, ())) for name, argument in own}


def frontend_arguments() -> dict[str, Argument]:
    """The fields of vLLM's OpenAI server (`chat_template`, `tool_call_parser`, ...)."""
    return _fields(cli_args.FrontendArgs)


def plain() -> dict[str, Any]:
    """Pydantic's schemas of arguments that are numbers, names, flags and mappings of these.

    They are JSON: values can be checked without vLLM. Other arguments hold vLLM's classes.
    """
    found: dict[str, Any] = {}
    for name, argument in (frontend_arguments() | engine_arguments()).items():
        if name in REFUSED or name == _SPECULATIVE or isinstance(argument.annotation, str) or is_secret(name):
            continue
        with suppress(TypeError):
            found[name] = json.loads(json.dumps(argument.adapter.core_schema))
    return found


def faults(engine_kwargs: Mapping[str, Any]) -> list[Fault]:
    """Everything that is wrong with these arguments, by path below `engine_kwargs`."""
    arguments = frontend_arguments() | engine_arguments()
    found: list[Fault] = []
    for name, value in engine_kwargs.items():
        if name in REFUSED:
            found.append(((name,), REFUSED[name]))
        elif name not in arguments:
            known = arguments.keys() - REFUSED.keys()
            found.append(((name,), unknown("vLLM argument", name, known, HELP)))
        else:
            below = arguments[name].faults(value) or _speculative(name, value)
            found += [((name, *path), text) for path, text in below]
    return found


def _speculative(name: str, value: Any) -> list[Fault]:
    """vLLM types `speculative_config` as any mapping and makes a SpeculativeConfig of it."""
    if name != _SPECULATIVE or not isinstance(value, Mapping):
        return []
    fields = _fields(SpeculativeConfig)
    found: list[Fault] = []
    for key, entry in cast("Mapping[str, Any]", value).items():
        if key not in fields:
            found.append(((key,), unknown("key", key, fields)))
        else:
            found += [((key, *path), text) for path, text in fields[key].faults(entry)]
    return found


def has_experts(model: str, engine_kwargs: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts. True where it cannot be read from here."""
    try:
        engine, _ = split(engine_kwargs)
        return AsyncEngineArgs(model=model, **engine).create_model_config().is_moe
    except Exception:  # of vLLM, transformers or the hub: the replica, which fetches the model, reports it
        return True


def split(
    engine_kwargs: Mapping[str, Any], location: Location | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments for AsyncEngineArgs and for FrontendArgs, mappings converted to vLLM's config
    objects.

    Raises: ConfigError with every fault.
    """
    plain = json.loads(to_json(engine_kwargs))
    found = [located((location or Location()) / "engine_kwargs", *fault) for fault in faults(plain)]
    if found:
        raise config_error(found)
    sides = engine_arguments(), frontend_arguments()
    engine, frontend = (
        {name: _made(side[name], value) for name, value in engine_kwargs.items() if name in side}
        for side in sides
    )
    return engine, frontend


def _made(argument: Argument, value: Any) -> Any:
    """vLLM makes config objects of some mappings and not of others, and wants sets where YAML has lists."""
    if isinstance(value, list) or (isinstance(value, Mapping) and shape(argument.annotation)):
        return argument.adapter.validate_python(value)
    return cast("Any", value)
