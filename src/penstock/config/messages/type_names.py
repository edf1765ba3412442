"""Types in plain words, for messages about values that do not fit and for the list of all settings.

It knows Python's typing and the limits of `annotated_types`.
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, SecretStr

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    SecretStr: "text",
    type: "a class",
    Callable: "a function",
    Any: "anything",
}
_LIMITS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))
_LISTED = 24  # names in a message


def describe(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """`int | None` with Ge(1) is "a whole number, at least 1"."""
    words = [_either(list(_branches(annotation)))]
    for limit in limits:
        words += [
            f"{text} {getattr(limit, name):g}" for kind, name, text in _LIMITS if isinstance(limit, kind)
        ]
    return ", ".join(words)


def choices(annotation: Any) -> list[str]:
    """The texts that are allowed by name; empty where any text is."""
    branches = list(_branches(annotation))
    if str in branches:
        return []
    return [name for branch in branches for name in _names(branch)]


def members(annotation: Any) -> list[str]:
    """The names of an enum's members."""
    return [name for branch in _branches(annotation) if _is(branch, enum.Enum) for name in _names(branch)]


def shape(annotation: Any) -> type[Any] | None:
    """The dataclass whose fields a mapping gives, if that is what the argument takes."""
    return next((branch for branch in _branches(annotation) if is_dataclass(branch)), None)  # pyright: ignore[reportReturnType]


def _branches(annotation: Any) -> Iterable[Any]:
    """What a union is made of, without None."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _branches(typing.get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _branches(argument)
    elif annotation is not type(None):
        yield annotation


def _either(branches: Sequence[Any]) -> str:
    words: list[str] = []
    for branch in branches:
        if not (_names(branch) and str in branches):  # a list of names beside free text limits nothing
            words += [word for word in _words(branch) if word not in words]
    if len(words) > _LISTED:
        words = [*words[:_LISTED], f"one of {len(words) - _LISTED} others"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _words(branch: Any) -> list[str]:
    names = _names(branch)
    if names:
        return [repr(name) for name in names]
    origin = typing.get_origin(branch) or branch
    if origin is Literal:
        return [repr(value) for value in typing.get_args(branch)]
    if _is(origin, enum.Enum):
        return [repr(member.value) for member in origin]
    if is_dataclass(branch) or _is(origin, BaseModel) or _is(origin, Mapping):
        return [_container("a mapping, each value", branch)]
    if origin in _WORDS:
        return [_WORDS[origin]]
    if _is(origin, Sequence) or _is(origin, Set):
        return [_container("a list, each entry", branch)]
    return [f"a {getattr(origin, '__name__', origin)}"]


def _container(words: str, branch: Any) -> str:
    """With what is inside, where that is said."""
    inside = typing.get_args(branch)[-1:]
    if not inside or inside[0] in (Any, Ellipsis):
        return words.partition(",")[0]
    return f"{words} {describe(inside[0])}"


def _names(branch: Any) -> list[str]:
    """Literal texts, or an enum's members."""
    if typing.get_origin(branch) is Literal:
        values = typing.get_args(branch)
        return list(values) if all(isinstance(value, str) for value in values) else []
    if _is(branch, enum.Enum) and not _is(branch, int):
        return [member.name for member in branch]
    return []


def _is(candidate: Any, kind: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, kind)
