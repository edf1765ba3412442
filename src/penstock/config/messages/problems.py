"""Mistakes in a config as sentences: where, what is wrong, what is allowed, and the nearest name.

Used wherever a config is read. It knows pydantic's error types and nothing of the fields themselves:
allowed names come from the models.
"""

from __future__ import annotations

import difflib
import logging
import re
import typing
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, core_schema

from penstock.config.messages.location import Location, Path
from penstock.config.messages.redact import is_secret, masked
from penstock.errors import ConfigError

_log = logging.getLogger(__name__)

REFUSED = "Refused:"
"""Fields whose description starts with it exist only to be refused with a sentence of their own."""

BRANCH = "~"
"""Tags of union branches start with it, which no key of a file does."""

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class CheckedDict:
    """A dict that is checked against `model` and stays the dict that the user wrote."""

    model: type[BaseModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Pydantic's hook."""
        return core_schema.no_info_wrap_validator_function(_check, handler(self.model))


def _check(value: Any, check: Callable[[Any], Any]) -> Any:
    """Also takes an object (Ray's `AutoscalingConfig(...)`, or of `model`), as the dict of what was set."""
    given = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
    check(given)
    return dict(given)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be: case and dashes aside, then by likeness."""
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=0.6)
    return plain[matches[0]] if matches else None


def unknown(what: str, name: str, known: Iterable[str], where: str | None = None) -> str:
    """`unknown key 'modl_id'; did you mean 'model_id'? Known: ...`.

    where: shown instead of the known names, if they are too many to list.
    """
    if not (names := sorted(known)):
        return f"unknown {what} {name!r}: there are no {what}s."
    guess = nearest(name, names)
    text = f"unknown {what} {name!r}" + (f"; did you mean {guess!r}?" if guess else ".")
    return f"{text} {where}" if where else f"{text} Known: {', '.join(names)}."


def config_error(problems: Iterable[str]) -> ConfigError:
    """One error for all problems, one line each."""
    lines = tuple(problems)
    if len(lines) == 1:
        return ConfigError(lines[0], lines)
    return ConfigError("\n".join([f"{len(lines)} problems:", *lines]), lines)


@dataclass(slots=True)
class ErrorCollector:
    """Collects the problems of several checks into one error."""

    found: list[str] = field(default_factory=list[str])

    @contextmanager
    def collecting(self, where: Location | None = None) -> Generator[None]:
        """A ConfigError inside is kept instead of raised. where: of one that does not say where it is."""
        try:
            yield
        except ConfigError as error:
            self.found += error.problems or [(where or Location()).says(str(error))]

    def raise_any(self) -> None:
        """Raises: ConfigError with everything that was gathered."""
        if self.found:
            raise config_error(self.found)


@contextmanager
def translated(model: type[BaseModel], location: Location | None = None) -> Generator[None]:
    """Turns pydantic's error about `model` into a ConfigError with every problem."""
    try:
        yield
    except ValidationError as error:
        # `from None`: pydantic's own text would show values that must not be shown.
        raise config_error(problems(error, model, location or Location())) from None


def problems(error: ValidationError, model: type[BaseModel], location: Location) -> list[str]:
    """Every fault that pydantic found, in our words."""
    found: list[str] = []
    for detail in error.errors(include_url=False):
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            found += cause.problems or [str(cause)]  # they carry their own location
            continue
        path, known = _locate(model, detail["loc"])
        where = Location(location.file, location.path + path, location.lines)
        found.append(where.says(_sentence(detail, path, known)))
    return found


def _locate(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[Path, list[str]]:
    """The path as the user wrote it, and the names that are known at its end."""
    path: list[str | int] = []
    inside: type[BaseModel] | None = model
    known = _names(model)
    for part in loc:
        if isinstance(part, str) and part.startswith(BRANCH):
            continue
        path.append(part)
        if inside is not None and isinstance(part, str):
            known = _names(inside)
            entry = inside.model_fields.get(part)
            inside = _model_in(entry.rebuild_annotation()) if entry else None
    return tuple(path), known


def _names(model: type[BaseModel]) -> list[str]:
    fields = model.model_fields.items()
    return [
        entry.alias or name for name, entry in fields if not (entry.description or "").startswith(REFUSED)
    ]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        if isinstance(argument, CheckedDict):
            return argument.model
        if found := _model_in(argument):
            return found
    return None


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "mapping_type": "a mapping",
    "list_type": "a list",
    "finite_number": "a finite number",
}

_NOUNS: Mapping[type, str] = {bool: "switch", int: "number", float: "number", str: "text", dict: "mapping"}

_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "greater than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def _sentence(detail: ErrorDetails, path: Path, known: list[str]) -> str:
    kind, given, facts = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return unknown("key", str(path[-1]), known)
    if kind == "missing":
        return "is missing; it must be given."
    if kind in ("value_error", "assertion_error"):
        return str(facts.get("error", detail["msg"]))
    hides = "keys" in path[-2:]  # a key itself, where an entry with its hash was meant
    hides |= any(is_secret(str(part)) or part == "env_vars" for part in path)
    shown = "" if hides else f" {show(given)}"
    if kind == "literal_error":
        expected = str(facts["expected"])
        guess = nearest(given, re.findall(r"'([^']*)'", expected)) if isinstance(given, str) else None
        hint = f" Did you mean {guess!r}?" if guess else ""
        return f"{shown.strip() or 'the value'} is not allowed; must be {expected}.{hint}"
    if kind in _WANTED:
        # YAML reads `model_id: 7` as a number and `HF_HUB_OFFLINE: yes` as true.
        quotes = " Write it in quotes." if kind == "string_type" and isinstance(given, int | float) else ""
        return f"is {_noun(given, shown)}; must be {_WANTED[kind]}.{quotes}"
    if kind in _LIMITS:
        limit, words = _LIMITS[kind]
        return f"is{shown}; must be {words} {facts[limit]:g}."
    if kind in ("string_too_short", "too_short"):
        return "is empty; it must not be."
    return f"{detail['msg']}{f'; got{shown}' if shown else ''}."


def show(value: object) -> str:
    """The value as a short text, secrets masked."""
    text = repr(masked(value))
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def described(value: object) -> str:
    """The value with its type, as it may be shown: `the number 3`, `the text 'abc'`."""
    return _noun(value, f" {show(value)}")


def _noun(value: object, shown: str) -> str:
    """What YAML or Python calls the type, in plain words, and the value where it may be shown."""
    if value is None:
        return "empty"
    noun = _NOUNS.get(type(value), type(value).__name__)
    return f"the {noun}{shown}" if shown else f"a {noun}"


@cache
def warn_once(text: str) -> None:
    """Logs what users should know of their config although it is no fault: once in a process."""
    _log.warning("%s", text)
