"""Base of whole configs, built by hand or from YAML: they raise `ConfigError`, never pydantic's error."""

from __future__ import annotations

from typing import Any, Self

from pydantic import PrivateAttr

from penstock.config.messages.location import Place
from penstock.config.messages.problems import told
from penstock.config.schema.strict import Part


class Root(Part):
    """A whole config. Remembers where it was read from, so that later checks can name the place."""

    _place: Place = PrivateAttr(default_factory=Place)

    def __init__(self, /, **values: Any) -> None:
        """Raises: ConfigError with every fault of `values`."""
        with told(type(self)):
            super().__init__(**values)

    # Inside other models pydantic builds instances itself: paths of nested faults stay whole.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @classmethod
    def parse(cls, values: Any, place: Place | None = None) -> Self:
        """From a mapping that was read at `place`.

        Raises: ConfigError with every fault, each with its place.
        """
        with told(cls, place):
            config = cls.model_validate(values)
        config._place = place or Place()
        return config

    def at(self, place: Place) -> Self:
        """The same config, written in another place."""
        moved = self.model_copy()
        moved._place = place
        return moved

    @property
    def place(self) -> Place:
        """Where this config was read; empty for one built in Python."""
        return self._place
