"""vLLM's own view of its arguments: which there are, what fits, and what a command line means.

`python -m penstock.engines.vllm.arguments` answers `check`'s questions in a process of its own, because
importing vLLM takes seconds and must not happen in the user's. The engine itself uses `split`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import enum
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, cast

import vllm.config
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from penstock.config.annotations import choices, describe, shape
from penstock.config.place import Path, Place
from penstock.config.problems import config_error, described, nearest, unknown
from penstock.engines.vllm.question import is_opaque, to_json
from penstock.engines.vllm.refused import REFUSED

Fault = tuple[Path, str]

HELP = "`python -m vllm.entrypoints.openai.api_server --help=all` lists all."


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
        names = choices(self.annotation)
        if isinstance(value, str) and value.upper() in (name.upper() for name in names):
            return []  # vLLM takes names of enum members in any case
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
        """The sentence about a value of the wrong type or out of the limits."""
        guess = nearest(value, choices(self.annotation)) if isinstance(value, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        return f"is {described(value)}; must be {describe(self.annotation, self.limits)}.{hint}"


def _faults_inside(outer: type[Any], error: ValidationError) -> list[Fault]:
    """Pydantic's findings about one of vLLM's config classes, one per path."""
    found: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        path: list[str | int] = []
        inside: Mapping[str, Argument] = _fields(outer)
        argument: Argument | None = None
        for part in detail["loc"]:
            if part in inside:
                path.append(part)
                argument = inside[part]
                inner = shape(argument.annotation)
                inside = _fields(inner) if inner else {}
            elif inside and detail["type"] == "unexpected_keyword_argument" and part == detail["loc"][-1]:
                found[*path, part] = unknown("key", str(part), inside)
        if detail["type"] == "value_error":
            found.setdefault(tuple(path), _in_vllms_words(detail["msg"]))
        elif argument is not None and detail["type"] != "unexpected_keyword_argument":
            found.setdefault(tuple(path), argument.misfit(detail["input"]))
    return list(found.items())


def _in_vllms_words(message: str) -> str:
    return f"vLLM says: {message.removeprefix('Value error, ').strip().splitlines()[0]}"


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
    return _fields(FrontendArgs)


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
    if name != "speculative_config" or not isinstance(value, Mapping):
        return []
    fields = _fields(SpeculativeConfig)
    found: list[Fault] = []
    for key, entry in cast("Mapping[str, Any]", value).items():
        if key not in fields:
            found.append(((key,), unknown("key", key, fields)))
        else:
            found += [((key, *path), text) for path, text in fields[key].faults(entry)]
    return found


def split(
    engine_kwargs: Mapping[str, Any], place: Place | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments for AsyncEngineArgs and for FrontendArgs, mappings made into vLLM's config objects.

    Raises: ConfigError with every fault.
    """
    plain = json.loads(to_json(engine_kwargs))
    found = [_told((place or Place()) / "engine_kwargs", fault) for fault in faults(plain)]
    if found:
        raise config_error(found)
    sides = engine_arguments(), frontend_arguments()
    engine, frontend = (
        {name: _made(side[name], value) for name, value in engine_kwargs.items() if name in side}
        for side in sides
    )
    return engine, frontend


def _told(place: Place, fault: Fault) -> str:
    path, text = fault
    return Place(place.file, place.path + path, place.lines).says(text)


def _made(argument: Argument, value: Any) -> Any:
    """vLLM makes config objects of some mappings and not of others, and wants sets where YAML has lists."""
    if isinstance(value, list) or (isinstance(value, Mapping) and shape(argument.annotation)):
        return argument.adapter.validate_python(value)
    return cast("Any", value)


class _Refusal(Exception):
    """What argparse would print before it exits."""


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refusal(message)


def parse(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`vllm serve`'s flags as engine_kwargs (what differs from the defaults), and what is wrong with them."""
    parser = cast("_Parser", make_arg_parser(_Parser(add_help=False)))
    _keep_json(parser)
    try:
        given = vars(parser.parse_args(list(argv)))
    except _Refusal as refusal:
        return {}, _told_by_argparse(str(refusal))
    defaults = vars(parser.parse_args([]))
    if given["model_tag"] is not None:
        return {}, [f"unexpected argument {given['model_tag']!r}; flags start with --."]
    kwargs = {name: _plain(name, value) for name, value in given.items() if value != defaults[name]}
    return kwargs, [f"{_flag(path)}: {text}" for path, text in faults(kwargs)]


def _keep_json(parser: FlexibleArgumentParser) -> None:
    """Flags that make a config object keep the JSON that was given; `faults` looks into it.

    vLLM's objects draw ids as they are made, and replicas must not share one.
    """
    arguments = engine_arguments()
    for action in parser._actions:  # pyright: ignore[reportPrivateUsage]  # argparse has no public way
        if action.dest in arguments and shape(arguments[action.dest].annotation) and callable(action.type):
            action.type = functools.partial(_json, action.type)


def _json(parse_text: Callable[[str], Any], text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        with contextlib.suppress(argparse.ArgumentTypeError):  # vLLM reads numbers such as 80m inside JSON
            value = parse_text(text)
            return TypeAdapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)
        raise argparse.ArgumentTypeError(f"is not valid JSON: {error}") from error


def _plain(name: str, value: Any) -> Any:
    """The value as YAML would have it."""
    if name == "optimization_level":  # the one number that vLLM's parser leaves as text
        return int(value)
    if name == "lora_modules":
        return [dataclasses.asdict(module) for module in value]
    if isinstance(value, enum.Enum):
        return value.name
    return sorted(value) if isinstance(value, set) else value


def _flag(path: Path) -> str:
    name, *inside = (str(part) for part in path)
    return ".".join([f"--{name.replace('_', '-')}", *inside])


def _told_by_argparse(message: str) -> list[str]:
    arguments = frontend_arguments() | engine_arguments()
    if message.startswith("unrecognized arguments:"):
        flags = [_flag((name,)) for name in arguments.keys() - REFUSED.keys()]
        given = [word.partition("=")[0] for word in message.split()[2:] if word.startswith("-")]
        return [unknown("flag", flag, flags, HELP) for flag in given] or [message]
    said = re.match(r"argument (\S+): (.*)", message)
    if said is None:
        return [f"{message}."]
    flag = next(name for name in said[1].split("/") if name.startswith("--"))
    value = re.match(
        r"(?:invalid choice: |invalid .* value: |Value )'?(.*?)'?(?: \(choose| cannot be|$)", said[2]
    )
    argument = arguments.get(flag[2:].replace("-", "_"))
    return [f"{flag}: {argument.misfit(value[1]) if argument and value else said[2] + '.'}"]


def main() -> None:
    """One JSON question on stdin, one JSON answer on stdout; whatever vLLM prints goes to stderr."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    question = json.load(sys.stdin)
    if "argv" in question:
        kwargs, problems = parse(question["argv"])
        json.dump({"kwargs": kwargs, "problems": problems}, answer)
    else:
        json.dump({"faults": [faults(kwargs) for kwargs in question["engine_kwargs"]]}, answer)
    answer.close()


if __name__ == "__main__":
    main()
