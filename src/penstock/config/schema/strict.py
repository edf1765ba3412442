"""Base of everything that users write: unknown keys are refused, types are not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import core_schema

from penstock.config.messages.redact import masked

BRANCH = "~"
"""Tags of union branches start with it, so that they can be told from keys of the file."""


class Part(BaseModel):
    """A piece of configuration."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Pydantic's hook for `repr` and `str`: secrets are masked."""
        for name, value in super().__repr_args__():
            yield name, masked({name: value})[name]


@dataclass(frozen=True, slots=True)
class Shape:
    """Annotation of a dict that is checked against `model` but stays the dict that the user wrote."""

    model: type[BaseModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Pydantic's hook."""
        return core_schema.no_info_wrap_validator_function(_keep, handler(self.model))


def _keep(value: Any, check: Callable[[Any], Any]) -> Any:
    """An object of Ray's own (`AutoscalingConfig(...)`) is as good as the dict of its fields."""
    if isinstance(value, BaseModel):
        check(value.model_dump(exclude_unset=True))
        return value
    check(value)
    return dict(value)
