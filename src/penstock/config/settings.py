"""The environment: every `PENSTOCK_*` name, read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, SecretStr

from penstock.config.part import Part
from penstock.config.problems import told

PREFIX = "PENSTOCK_"


def _secret(text: object) -> object:
    """An empty variable is an unset one."""
    return SecretStr(text) if isinstance(text, str) and text else None


def _variable(field: str) -> str:
    return PREFIX + field.upper()


class Settings(Part):
    """What the environment says."""

    model_config = ConfigDict(alias_generator=_variable)

    accelerator: Literal["auto", "cpu", "gpu"] = Field(
        default="auto", description="`cpu` runs any config on CPU; `gpu` asks for GPUs; `auto` looks."
    )
    api_key: Annotated[SecretStr | None, BeforeValidator(_secret)] = Field(
        default=None, description="Key that clients must send, where the gateway's config gives none."
    )
    admin_key: Annotated[SecretStr | None, BeforeValidator(_secret)] = Field(
        default=None, description="Key of the admin endpoints, where the gateway's config gives none."
    )
    engine_cls: str | None = Field(
        default=None,
        min_length=1,
        description="Import path of the engine class to use for every model, for tests.",
    )

    cache: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for downloaded models and adapters; by default `~/.cache/penstock`.",
    )

    def cache_folder(self) -> Path:
        """Where we keep what can be fetched or computed again."""
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        return Path(self.cache).expanduser() if self.cache else usual

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads `environment` (default: the process's).

        Raises: ConfigError naming every unknown or unreadable variable.
        """
        given = os.environ if environment is None else environment
        with told(cls):
            return cls.model_validate({name: text for name, text in given.items() if name.startswith(PREFIX)})
