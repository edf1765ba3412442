"""One thing that a capability needs of vLLM, and how the installed vLLM differs from it."""

from __future__ import annotations

import ast
from collections.abc import Callable

from penstock.engines.vllm.capabilities.source import Function, PackageSource

Need = Callable[[PackageSource], str | None]
"""Returns how the source differs from what is needed; None where it does not.

References are as in `PackageSource.find`: `v1.engine.core:EngineCoreProc.step`.
"""


def has(*references: str) -> Need:
    """These names exist."""

    def gap(source: PackageSource) -> str | None:
        missing = [one for one in references if source.find(one) is None]
        return f"{_name(missing[0])} is gone" if missing else None

    return gap


def one_of(*needs: Need) -> Need:
    """One of these is met: names that have moved."""

    def gap(source: PackageSource) -> str | None:
        gaps = [need(source) for need in needs]
        return None if None in gaps else gaps[-1]

    return gap


def says(module: str, *texts: str) -> Need:
    """These texts are in a module's source, as a message or a key that both sides must know."""

    def gap(source: PackageSource) -> str | None:
        whole = source.text(module)
        missing = next((one for one in texts if one not in (whole or "")), None)
        return missing and f"{module} does not contain {missing}"

    return gap


def takes(reference: str, *names: str) -> Need:
    """A function that we call by these names: it takes them, and requires no others."""

    def gap(source: PackageSource) -> str | None:
        function = source.find(reference)
        if not isinstance(function, Function):
            return f"{_name(reference)} is gone"
        known = _parameters(function)
        missing = [name for name in names if name not in known and function.args.kwarg is None]
        more = [name for name in _required(function) if name not in names]
        if missing:
            return f"{_name(reference)} does not take {missing[0]}"
        return f"{_name(reference)} requires {more[0]}" if more else None

    return gap


def exactly(reference: str, *names: str, new: tuple[str, ...] = ()) -> Need:
    """A function that we replace: it has these parameters in this order and, at most, those in `new`."""

    def gap(source: PackageSource) -> str | None:
        function = source.find(reference)
        if not isinstance(function, Function):
            return f"{_name(reference)} is gone"
        found = [name for name in _parameters(function) if name not in new]
        if found != list(names):
            return f"{_name(reference)} takes ({', '.join(found)}), not ({', '.join(names)})"
        return None

    return gap


def fields(reference: str, *names: str, new: tuple[str, ...] = ()) -> Need:
    """A structure with these fields and, at most, those in `new`: an unknown one would be lost or delayed."""

    def gap(source: PackageSource) -> str | None:
        found = source.fields(reference)
        if found is None:
            return f"{_name(reference)} is gone"
        missing = [name for name in names if name not in found]
        unknown = [name for name in found if name not in names and name not in new]
        if missing:
            return f"{_name(reference)} has no {missing[0]}"
        return f"{_name(reference)} has a new field, {unknown[0]}" if unknown else None

    return gap


def _name(reference: str) -> str:
    return reference.partition(":")[2] or reference


def _parameters(function: Function) -> list[str]:
    """Without `self`, `*args` and `**kwargs`."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name != "self"]


def _required(function: Function) -> list[str]:
    given = function.args
    positional: list[ast.arg] = [*given.posonlyargs, *given.args]
    required = positional[: len(positional) - len(given.defaults)]
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    required += [one for one, default in named if default is None]
    return [one.arg for one in required if one.arg != "self"]
