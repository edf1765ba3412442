"""Versions of a model side by side: which of them answers a request for the model's name.

`loading.versions` makes a config of each, with a `VersionConfig` that says what it is a version of.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from penstock.config.schema.strict import StrictModel, setting

VersionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Sticky = Literal["user", "session", "none"]


class VersionEntry(StrictModel):
    """A version as users write it: its name, its weight, and any field of the model's config over it."""

    model_config = ConfigDict(extra="allow")

    name: VersionName = Field(
        description="The part behind the `@` in `qwen@b`, by which it can be asked for alone."
    )
    weight: float = setting(
        1.0, "Its share of the model's requests, beside the other weights. 0 for none.", ge=0
    )


class VersionConfig(StrictModel):
    """A config's part in a model with versions."""

    of: str = Field(min_length=1, description="The name of the model.")
    name: VersionName = Field(description="The version's name.")
    weight: float = setting(1.0, "Its share of the model's requests.", ge=0)
    sticky: Sticky = setting("none", "As the model says it.")

    @property
    def full_name(self) -> str:
        """By which clients ask for this version alone."""
        return f"{self.of}@{self.name}"


def own_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Of the model's config, those that the version has otherwise."""
    return {name: value for name, value in entry.items() if name not in VersionEntry.model_fields}
