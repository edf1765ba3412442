"""Versions of a model side by side: which of them answers a request for the model's name.

`loading.versions` makes a config of each, with a `VersionConfig` that says what it is a version of.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from penstock.config.schema.paths import LocalFile
from penstock.config.schema.strict import Name, StrictModel, optional, setting

Sticky = Literal["user", "session", "none"]


class VersionEntry(StrictModel):
    """A version as users write it: its name, its weight, and any field of the model's config over it."""

    model_config = ConfigDict(extra="allow")

    name: Name = Field(description="The part behind the `@` in `qwen@b`, by which it can be asked for alone.")
    weight: float = setting(
        1.0, "Its share of the model's requests, beside the other weights. 0 for none.", ge=0
    )


class CanaryConfig(StrictModel):
    """A version whose share is raised by steps, as long as it does as well as the others."""

    version: Name = Field(description="Its name.")
    steps: list[Annotated[float, Field(gt=0, le=100)]] = setting(
        [5.0, 25.0, 50.0, 100.0], "Its share of the requests in each step, in percent.", min_length=1
    )
    step_s: float = setting(300.0, "How long a step takes at least.", gt=0)
    min_requests: int = setting(50, "How many requests it must get in each step before the next one.", ge=1)
    max_error_rate: float = setting(
        0.01, "How much larger a part of its requests may fail than of the others'.", ge=0, lt=1
    )
    max_ttft_ratio: float = setting(
        2.0, "How many times as long as the others' its time to the first token may be.", ge=1
    )
    max_itl_ratio: float = setting(1.5, "The same of the time between tokens.", ge=1)

    @field_validator("steps")
    @classmethod
    def _rising(cls, steps: list[float]) -> list[float]:
        if fall := next((pair for pair in pairwise(steps) if pair[0] > pair[1]), None):
            raise ValueError(f"must not fall, and {fall[1]:g} comes after {fall[0]:g}.")
        return steps


class ShadowConfig(StrictModel):
    """A version that answers some requests for other versions as well, unseen by clients."""

    version: Name = Field(description="Its name.")
    share: float = setting(0.1, "The part of the other versions' requests that it gets, too.", gt=0, le=1)
    answers: LocalFile | None = optional(
        "File to which both answers are appended, as JSON Lines; for its user only."
    )


def _named(value: object) -> object:
    """`canary: b` is `canary: {version: b}`."""
    return {"version": value} if isinstance(value, str) else value


Canary = Annotated[CanaryConfig | None, BeforeValidator(_named, CanaryConfig | Name | None)]
Shadow = Annotated[ShadowConfig | None, BeforeValidator(_named, ShadowConfig | Name | None)]


class VersionConfig(StrictModel):
    """A config's part in a model with versions."""

    of: str = Field(min_length=1, description="The name of the model.")
    name: Name = Field(description="The version's name.")
    weight: float = setting(1.0, "Its share of the model's requests.", ge=0)
    sticky: Sticky = setting("none", "As the model says it.")
    canary: CanaryConfig | None = optional("That of the model, if it is this version.")
    shadow: ShadowConfig | None = optional("That of the model, if it is this version.")
    revision: str = setting("", "Another one where its answers may be others. Builders set it.")

    @property
    def full_name(self) -> str:
        """By which clients ask for this version alone."""
        return f"{self.of}@{self.name}"


def own_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """Of the model's config, those that the version has otherwise."""
    return {name: value for name, value in entry.items() if name not in VersionEntry.model_fields}
