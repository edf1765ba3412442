"""One thing that a capability needs of vLLM, and how the installed vLLM differs from it.

A function is written with its parameters' names: `v1.engine.core:EngineCoreProc.add_request(request, wave)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from penstock.engines.vllm.arguments.source import Function, PackageSource

P = ParamSpec("P")
Need = Callable[[PackageSource], str | None]
"""Returns how the source differs from what is needed; None where it does not."""


def _need(gap: Callable[Concatenate[PackageSource, P], str | None]) -> Callable[P, Need]:
    return lambda *args, **named: lambda source: gap(source, *args, **named)


@_need
def has(source: PackageSource, owner: str, names: str) -> str | None:
    """A module, or a class in one (`module:Class`), has these names."""
    references = [f"{owner}{'.' if ':' in owner else ':'}{name}" for name in names.split()]
    missing = [one for one in references if source.find(one) is None]
    return _gone(missing[0]) if missing else None


@_need
def one_of(source: PackageSource, *needs: Need) -> str | None:
    """One of these is met: names that have moved."""
    gaps = [need(source) for need in needs]
    return None if None in gaps else gaps[-1]


@_need
def says(source: PackageSource, module: str, *texts: str) -> str | None:
    """These texts are in a module's source, as a message or a key that both sides must know."""
    whole = source.text(module)
    missing = next((one for one in texts if one not in (whole or "")), None)
    return missing and f"{module} does not contain {missing}"


@_need
def takes(source: PackageSource, signature: str) -> str | None:
    """A function that we call with these parameters: it takes them, and requires no others."""
    reference, names = _parsed(signature)
    function = source.find(reference)
    if not isinstance(function, Function):
        return _gone(reference)
    known = _parameters(function)
    missing = [name for name in names if name not in known and function.args.kwarg is None]
    more = [name for name in _required(function) if name not in names]
    if missing:
        return f"{_name(reference)} does not take {missing[0]}"
    return f"{_name(reference)} requires {more[0]}" if more else None


@_need
def exactly(source: PackageSource, signature: str, new: str = "") -> str | None:
    """A function that we replace: it has these parameters in this order and, at most, those in `new`."""
    reference, names = _parsed(signature)
    function = source.find(reference)
    if not isinstance(function, Function):
        return _gone(reference)
    found = [name for name in _parameters(function) if name not in new.split()]
    if found != names:
        return f"{_name(reference)} takes ({', '.join(found)}), not ({', '.join(names)})"
    return None


@_need
def fields(source: PackageSource, reference: str, names: str, new: str = "") -> str | None:
    """A structure with these fields and, at most, those in `new`: an unknown one would be lost or delayed."""
    found = source.fields(reference)
    if found is None:
        return _gone(reference)
    missing = [name for name in names.split() if name not in found]
    unknown = [name for name in found if name not in f"{names} {new}".split()]
    if missing:
        return f"{_name(reference)} has no {missing[0]}"
    return f"{_name(reference)} has a new field, {unknown[0]}" if unknown else None


def _gone(reference: str) -> str:
    return f"{_name(reference)} is gone"


def _name(reference: str) -> str:
    return reference.partition(":")[2] or reference


def _parsed(signature: str) -> tuple[str, list[str]]:
    reference, _, names = signature.rstrip(")").partition("(")
    return reference, names.replace(",", " ").split()


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
