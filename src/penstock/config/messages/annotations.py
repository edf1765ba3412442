"""Annotations of fields that messages about their values look into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import core_schema

BRANCH = "~"
"""Tags of union branches start with it, which no key of a file does."""


@dataclass(frozen=True, slots=True)
class CheckedDict:
    """A dict that is checked against `model` and stays the dict that the user wrote."""

    model: type[BaseModel]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Pydantic's hook."""
        return core_schema.no_info_wrap_validator_function(_check, handler(self.model))


def _check(value: Any, check: Callable[[Any], Any]) -> Any:
    """Also takes an object of Ray's (`AutoscalingConfig(...)`), as the dict of its fields."""
    if isinstance(value, BaseModel):
        check(value.model_dump(exclude_unset=True))
        return value
    check(value)
    return dict(value)
