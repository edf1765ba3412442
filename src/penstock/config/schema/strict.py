"""Base classes of everything that users write: unknown keys are refused, types are not guessed."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Self, TextIO, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from penstock.config.messages.location import Location
from penstock.config.messages.problems import translated
from penstock.config.messages.redact import masked

T = TypeVar("T")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


def setting(default: T, description: str, **limits: Any) -> T:
    """A field with its default. limits: as pydantic's `Field` takes them."""
    return Field(default=default, description=description, **limits)


def optional(description: str, **limits: Any) -> Any:
    """A field that is None where nothing is given."""
    return setting(None, description, **limits)


def section(kind: type[T], description: str) -> T:
    """A field that is a section; without one, its defaults."""
    return Field(default_factory=kind, description=description)


def matching(pattern: str, words: str) -> tuple[Any, Any]:
    """For `Annotated[str, *matching(...)]`. words: what the text must be, for the message."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):  # `$` alone would take a newline at the end
            raise ValueError(f"must be {words}.")
        return text

    return Field(json_schema_extra={"pattern": pattern}), AfterValidator(check)


Name = Annotated[
    str,
    *matching(NAME, "at most 64 letters, digits, dots, dashes and underscores, with a letter or digit first"),
]
"""Of a tenant, a key or a version."""


class StrictModel(BaseModel):
    """A section of a config. Built by its name it raises `ConfigError`, never pydantic's error."""

    # An infinite number would be lost on its way to other processes: JSON has none.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, /, **values: Any) -> None:
        """Raises: ConfigError with every fault of `values`."""
        with translated(type(self)):
            super().__init__(**values)

    # Inside other models pydantic builds instances itself: paths of nested faults stay whole.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Pydantic's hook for `repr` and `str`: secrets are masked."""
        for name, value in super().__repr_args__():
            yield name, masked({name: value})[name]

    @classmethod
    def parse(cls, values: Any, location: Location | None = None) -> Self:
        """From a mapping that was read at `location`. Raises: ConfigError with every fault, and where."""
        location = location or Location()
        with translated(cls, location):
            return cls.model_validate(values, context=(location, {}))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """From a YAML file. Raises: ConfigError with every fault, each with its line."""
        return cls.parse(*_yaml().read(path))

    @classmethod
    def parse_yaml(cls, file: str | TextIO) -> Self:
        """From YAML: its text, or a file that is open. Raises: as `from_file`."""
        text, name = (file, "") if isinstance(file, str) else (file.read(), str(getattr(file, "name", "")))
        return cls.parse(*_yaml().parse(text, name))


class RootConfig(StrictModel):
    """A whole config. It remembers where it was read."""

    _location: Location = PrivateAttr(default_factory=Location)

    @classmethod
    def parse(cls, values: Any, location: Location | None = None) -> Self:
        """From a mapping that was read at `location`.

        Raises: ConfigError with every fault, each with its location.
        """
        config = super().parse(values, location)
        config._location = location or Location()
        return config

    @classmethod
    def from_argument(cls, given: Any, name: str) -> Self:
        """A config as it is, or what a mapping says. name: of the argument. Raises: ConfigError."""
        return given if isinstance(given, cls) else cls.parse(given, Location() / name)

    def at(self, location: Location) -> Self:
        """The same config, said to be read at `location`."""
        moved = self.model_copy()
        moved._location = location
        return moved

    @property
    def location(self) -> Location:
        """Where this config was read; empty for one built in Python."""
        return self._location


def _yaml() -> Any:
    """What reads files imports what is written in them: it is imported when a method is called."""
    return importlib.import_module("penstock.config.loading.yaml_source")
