"""The environment: every `PENSTOCK_*` name, read here and nowhere else."""

from __future__ import annotations

import binascii
import os
import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, SecretStr

from penstock.config.messages.problems import nearest, translated, warn_once
from penstock.config.schema.strict import StrictModel, optional, setting

PREFIX = "PENSTOCK_"

_KUBERNETES = re.compile(
    r"PENSTOCK(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes sets in each pod of a namespace for Services named `penstock` or `penstock-...`."""


_HEADER_TEXT = re.compile(r"[^\s\x00-\x1f\x7f]([^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f])?")


def _secret(text: object) -> object:
    """An empty variable is an unset one."""
    return SecretStr(text) if isinstance(text, str) and text else None


def _sendable(key: SecretStr | None) -> SecretStr | None:
    if key is not None and not _HEADER_TEXT.fullmatch(key.get_secret_value()):
        raise ValueError(
            "is nothing that a client can send in a header: it is blank, or has a line break or blanks "
            "around it."
        )
    return key


SentKey = Annotated[SecretStr | None, AfterValidator(_sendable)]
"""A key that clients send."""


def _signing(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and (text := secret.get_secret_value()).startswith("whsec_"):
        try:
            key = b64decode(text.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            key = b""
        if not key:
            raise ValueError("must have base64 after `whsec_`; or write another text.")
    return secret


_Signing = Annotated[SecretStr | None, AfterValidator(_signing)]


def _variable(field: str) -> str:
    return PREFIX + field.upper()


def service_name(app_name: str, port: int | None) -> str:
    """For what a service stores in a folder that it shares with other services of this machine. port: the
    gateway's own, if it has one.
    """
    return app_name if port is None else f"{app_name}-{port}"


class Settings(StrictModel):
    """What the environment says."""

    model_config = ConfigDict(alias_generator=_variable)

    accelerator: Literal["auto", "cpu", "gpu"] = setting(
        "auto", "`cpu` runs any config on CPU; `gpu` asks for GPUs; `auto` looks."
    )
    cluster: Literal["fixed", "growing"] = setting(
        "fixed",
        "`growing` for an autoscaled cluster, or one whose nodes are still coming: a model waits "
        "for GPUs that no node has yet. `fixed` refuses it.",
    )
    api_key: Annotated[SentKey, BeforeValidator(_secret)] = optional(
        "Key that clients must send, where the config gives none; else VLLM_API_KEY."
    )
    admin_key: Annotated[SentKey, BeforeValidator(_secret)] = optional(
        "Key of the admin endpoints, where the gateway's config gives none."
    )
    engine_cls: str | None = optional(
        "Import path of the engine class to use for every model, for tests.", min_length=1
    )

    log_format: Literal["text", "json"] = setting(
        "text",
        "Form of the log lines of every process; `penstock serve --log-format` sets it for all "
        "that it starts.",
    )

    cache: str | None = optional(
        "Folder for downloaded models and adapters; by default `~/.cache/penstock`.", min_length=1
    )

    usage: str | None = optional(
        "Folder for tenants' usage and the audit log; by default `usage` in the cache folder.", min_length=1
    )

    webhook_secret: Annotated[_Signing, BeforeValidator(_secret)] = optional(
        "Signs what `gateway.webhook` is told: `whsec_` and base64, or any other text. Control reads it."
    )

    vllm_capabilities_off: str = setting(
        "",
        "Capabilities of vLLM to do without, by name, separated by commas; `all` for every one. "
        "For tests, and to find out which one is at fault; `penstock version` lists those that are off.",
    )

    gpus: str = setting(
        "",
        "GPUs for `penstock check --gpu` that its table lacks, and how much of their memory can be used: "
        "`NAME=GIB,NAME=GIB`.",
    )

    def cache_folder(self) -> Path:
        """Where we keep what can be fetched or computed again."""
        if self.cache:
            return Path(os.path.expanduser(self.cache))
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Reads `environment` (default: the process's).

        An unknown name is an error where it is like a known one, else a warning: others may own it.
        Raises: ConfigError naming every misspelt or unreadable variable.
        """
        given = os.environ if environment is None else environment
        ours = {name: text for name, text in given.items() if name.startswith(PREFIX)}
        ours["PENSTOCK_API_KEY"] = ours.get("PENSTOCK_API_KEY") or given.get("VLLM_API_KEY", "")
        known = {_variable(field) for field in cls.model_fields}
        for name in ours.keys() - known:
            if _KUBERNETES.fullmatch(name) or name == "PENSTOCK_WEBHOOK":  # that is for `apply --from`
                del ours[name]
            elif not nearest(name.removeprefix(PREFIX), (one.removeprefix(PREFIX) for one in known)):
                del ours[name]
                names = ", ".join(sorted(known))
                warn_once(f"The environment variable {name} has no effect. Known: {names}.")
        with translated(cls):
            return cls.model_validate(ours)
