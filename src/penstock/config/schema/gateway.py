"""`GatewayConfig` and `LLMServingArgs`: the front door, and all that `build_openai_app` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from penstock.config.loading import yaml_source
from penstock.config.messages.location import Place
from penstock.config.messages.problems import Faults, told
from penstock.config.schema.deployment import DeploymentOptions
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.root import Root
from penstock.config.schema.settings import Settings
from penstock.config.schema.strict import Shape
from penstock.errors import ConfigError


def _key_from_environment() -> SecretStr | None:
    return Settings.read().api_key


def _admin_key_from_environment() -> SecretStr | None:
    return Settings.read().admin_key


def _secret(value: object) -> object:
    return SecretStr(value) if isinstance(value, str) else value


class GatewayConfig(Root):
    """The OpenAI-compatible front door of all models."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Own port. Without it the gateway stands behind Ray Serve's HTTP.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Gateway processes. On their own port they share it; when one dies, the others go on.",
    )
    api_key: Annotated[SecretStr | None, Field(min_length=1), BeforeValidator(_secret)] = Field(
        default_factory=_key_from_environment,
        description="Key that clients must send. Without it PENSTOCK_API_KEY; "
        "without both, any key is accepted.",
    )
    admin_key: Annotated[SecretStr | None, Field(min_length=1), BeforeValidator(_secret)] = Field(
        default_factory=_admin_key_from_environment,
        description="Key of the endpoints under `/admin`, by which models are put to sleep, paused and more. "
        "Without it PENSTOCK_ADMIN_KEY; without both there are no such endpoints.",
    )
    default_model: str | None = Field(
        default=None, min_length=1, description="Model of requests that name none. With one model, that one."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one request.")
    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="Size limit of a request's body.")
    max_bodies_bytes: int = Field(
        default=2**30,
        gt=0,
        description="Size limit of all bodies that wait for their answers to begin, in each gateway process.",
    )
    max_connections_per_address: int = Field(
        default=4096,
        gt=0,
        description="Connections of one address (IPv6: of one /64 network) to the gateway's own port that "
        "have no accepted request open. Above it the one that has waited longest is closed.",
    )
    wait_for_replica_s: float = Field(
        default=30.0, ge=0, description="How long a request waits while no replica is there."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Form of the log lines.")


MODELS, MODEL, PREFILL, DECODE = FORMS = "llm_configs", "llm_config", "prefill_config", "decode_config"
"""Keys of a mapping that are models: many; one; one in two halves."""


class LLMServingArgs(Root):
    """Arguments of `build_openai_app`: the models and their gateway.

    Raises: ConfigError with every fault of every model at once.
    """

    llm_configs: list[LLMConfig] = Field(
        min_length=1, description="One entry per model: an LLMConfig, a mapping, or the path of a YAML file."
    )
    gateway: GatewayConfig = Field(default_factory=lambda: GatewayConfig(), description="The front door.")
    ingress_deployment_config: Annotated[dict[str, Any], Shape(DeploymentOptions)] = Field(
        default={}, description="Options of Ray Serve's deployment of the gateway."
    )

    @classmethod
    def parse(cls, values: Any, place: Place | None = None, seen: dict[str, Place] | None = None) -> Self:
        """From a mapping that was read at `place`. Model paths count from its file's folder, else from here.

        seen: model ids that other applications of the same file use; this one's are added.
        """
        where = place or Place()
        if isinstance(values, Mapping):
            values = _with_models(values, where)
        with told(cls, where):
            args = cls.model_validate(values, context=(where, {} if seen is None else seen))
        args._place = where
        return args

    @field_validator("llm_configs", mode="before")
    @classmethod
    def _each_model(cls, entries: Any, info: ValidationInfo) -> Any:
        """Reads every entry, so that the faults of all of them are told together."""
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            return entries
        place, seen = info.context or (Place(), {})
        faults = Faults()
        models: list[LLMConfig] = []
        for i, entry in enumerate(entries):
            with faults.gathered():
                models.append(_model(entry, place / "llm_configs" / i, seen, faults))
        faults.raise_any()
        return models


def _with_models(values: Mapping[str, Any], place: Place) -> Mapping[str, Any]:
    """The arguments of builders of one model as those of `build_openai_app`. Raises: ConfigError."""
    rest = {name: value for name, value in values.items() if name not in (MODEL, PREFILL, DECODE)}
    if MODEL in values:
        return {**rest, MODELS: [values[MODEL]]}
    if PREFILL in values or DECODE in values:
        return {**rest, MODELS: [_joined(values, place)]}
    return values


def _joined(values: Mapping[str, Any], place: Place) -> LLMConfig:
    """Two halves of one model. Raises: ConfigError."""
    faults = Faults()
    parsed: dict[str, LLMConfig] = {}
    for name in (PREFILL, DECODE):
        with faults.gathered():
            if name not in values:
                raise ConfigError(place.says(f"{name} is missing: {PREFILL} and {DECODE} belong together."))
            parsed[name] = _model(values[name], place / name, {}, faults)
    faults.raise_any()
    return parsed[DECODE].with_prefill(parsed[PREFILL])


def _model(entry: Any, place: Place, seen: dict[str, Place], faults: Faults) -> LLMConfig:
    """One model. Its id may be a fault of its own, beside those inside."""
    values = entry
    if isinstance(entry, str):
        values, place = _from_file(entry, place)
    elif isinstance(entry, LLMConfig):
        place = entry.place
    model_id = _model_id(values)
    if model_id in seen:
        first = seen[model_id] / "model_loading_config" / "model_id"
        where = place / "model_loading_config" / "model_id"
        faults.found.append(where.says(f"{model_id!r} is used twice; model ids must differ. First: {first}."))
    elif model_id is not None:
        seen[model_id] = place
    return values if isinstance(values, LLMConfig) else LLMConfig.parse(values, place)


def _from_file(name: str, place: Place) -> tuple[Any, Place]:
    try:
        found = yaml_source.read(name, File(place.file).parent if place.file else None)
    except ConfigError as error:
        if error.problems:
            raise
        raise ConfigError(place.says(str(error))) from error
    return found.data, found.place


def _model_id(values: Any) -> str | None:
    if isinstance(values, LLMConfig):
        return values.model_id
    try:
        model_id = values["model_loading_config"]["model_id"]
    except (TypeError, KeyError):
        return None
    return model_id if isinstance(model_id, str) else None
