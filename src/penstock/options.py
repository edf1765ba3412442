"""Options of a command as fields of a dataclass: type, default and help of each stand in one place.

Imports no config, so that `--help` is there at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, field, fields, is_dataclass
from functools import partial, wraps
from typing import Annotated, Any, get_type_hints

import typer

OPTION = "option"
"""In the metadata of such fields."""


def option(help: str, default: Any = None, *flags: str, **more: Any) -> Any:
    """A field that is an option of a command.

    flags: in place of `--name`. more: as typer's `Option` takes it.
    """
    return field(default=default, metadata={OPTION: partial(typer.Option, *flags, help=help, **more)})


def argument(help: str, default: Any = None, **more: Any) -> Any:
    """A field that is an argument of a command. more: as typer's `Argument` takes it."""
    return field(default=default, metadata={OPTION: partial(typer.Argument, help=help, **more)})


def by_fields(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """The same command for typer: options are those fields of the dataclasses that it takes."""
    signature = inspect.signature(command, eval_str=True)
    options: list[inspect.Parameter] = []
    shapes: dict[str, tuple[type, list[str]]] = {}
    for name, taken in signature.parameters.items():
        if not (isinstance(shape := taken.annotation, type) and is_dataclass(shape)):
            options.append(taken)
            continue
        written = [one for one in fields(shape) if OPTION in one.metadata]
        hints = get_type_hints(shape)
        shapes[name] = shape, [one.name for one in written]
        options += [_parameter(taken, one, hints[one.name]) for one in written]

    @wraps(command)
    def run(**given: Any) -> int | None:
        for name, (shape, written) in shapes.items():
            given[name] = shape(**{field: given.pop(field) for field in written})
        return command(**given)

    run.__signature__ = signature.replace(parameters=options)  # pyright: ignore[reportAttributeAccessIssue]
    return run


def _parameter(taken: inspect.Parameter, one: Field[Any], kind: Any) -> inspect.Parameter:
    """`taken` as this option. A switch has no `--no-name`."""
    make = one.metadata[OPTION]
    info = make(f"--{one.name.replace('_', '-')}") if kind is bool else make()
    return taken.replace(name=one.name, default=one.default, annotation=Annotated[kind, info])
