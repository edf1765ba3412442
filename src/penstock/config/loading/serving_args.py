"""`LLMServingArgs`: all that `build_openai_app` takes. Reads the files that name models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as File
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.config.loading import yaml_source
from penstock.config.loading.versions import with_versions
from penstock.config.messages.location import Location
from penstock.config.messages.problems import ErrorCollector, translated
from penstock.config.schema.deployment import Deployment
from penstock.config.schema.gateway import GatewayConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.processing import ClassOrPath
from penstock.config.schema.strict import RootConfig, StrictModel, optional, section, setting
from penstock.errors import ConfigError

MODELS, MODEL, PREFILL, DECODE = FORMS = "llm_configs", "llm_config", "prefill_config", "decode_config"
"""Keys of a mapping that are models: many; one; one in two halves."""


_Models = Annotated[list[LLMConfig | str], Field(min_length=1)]


class IngressClsConfig(StrictModel):
    """A class in the gateway's place, with endpoints of its own."""

    ingress_cls: ClassOrPath = optional(
        "A subclass of `penstock.serve.ingress.OpenAiIngress`, or its import path `package.module:Class`."
    )
    ingress_extra_kwargs: dict[str, Any] = setting({}, "More arguments of that class.")

    @model_validator(mode="after")
    def _arguments_of_something(self) -> Self:
        if self.ingress_extra_kwargs and self.ingress_cls is None:
            raise ValueError("ingress_extra_kwargs are given, but no ingress_cls.")
        return self


class LLMServingArgs(RootConfig):
    """Arguments of `build_openai_app`: the models and their gateway.

    Raises: ConfigError with every fault of every model at once.
    """

    llm_configs: list[LLMConfig] = Field(
        min_length=1, description="One entry per model: an LLMConfig, a mapping, or the path of a YAML file."
    )
    gateway: GatewayConfig = section(GatewayConfig, "The gateway.")
    ingress_deployment_config: Deployment = setting({}, "Options of Ray Serve's deployment of the gateway.")
    jobs: JobsConfig | None = section(JobsConfig, "The Files and Batches APIs; `off` for none.")
    ingress_cls_config: IngressClsConfig = section(
        IngressClsConfig, "Your own class in the gateway's place. See docs/serve/preprocessing.md."
    )

    @field_validator("jobs", mode="before", json_schema_input_type=JobsConfig | Literal["off", False] | None)
    @classmethod
    def _off(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return None if value is False or value == "off" else value

    @model_validator(mode="after")
    def _one_door(self) -> Self:
        if self.ingress_cls_config.ingress_cls is not None and self.gateway.port is not None:
            raise ValueError(
                "gateway.port does not go with ingress_cls_config: endpoints of your own class are answered "
                "through Ray Serve's HTTP. Leave gateway.port out, or use `endpoint` of a server class."
            )
        return self

    @classmethod
    def parse(
        cls, values: Any, location: Location | None = None, seen: dict[str, Location] | None = None
    ) -> Self:
        """From a mapping read at `location`. Paths of models count from its file's folder, else from here.

        seen: model ids that other applications of the same file use; this one's are added.
        """
        where = location or Location()
        if isinstance(values, Mapping):
            values = _with_models(values, where)
        with translated(cls, where):
            args = cls.model_validate(values, context=(where, {} if seen is None else seen))
        args._location = where
        return args

    @field_validator("llm_configs", mode="before", json_schema_input_type=_Models)
    @classmethod
    def _each_model(cls, entries: Any, info: ValidationInfo) -> Any:
        """Reads every entry, so that one error has the faults of all."""
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            return entries
        location, seen = info.context or (Location(), {})
        faults = ErrorCollector()
        models: list[LLMConfig] = []
        for i, entry in enumerate(entries):
            with faults.collecting():
                models += _models(entry, location / "llm_configs" / i, seen, faults)
        faults.raise_any()
        return models


def _with_models(values: Mapping[str, Any], location: Location) -> Mapping[str, Any]:
    """The arguments of builders of one model as those of `build_openai_app`. Raises: ConfigError."""
    rest = {name: value for name, value in values.items() if name not in (MODEL, PREFILL, DECODE)}
    if MODEL in values:
        return {**rest, MODELS: [values[MODEL]]}
    if PREFILL in values or DECODE in values:
        return {**rest, MODELS: [_joined(values, location)]}
    return values


def _joined(values: Mapping[str, Any], location: Location) -> LLMConfig:
    """Two halves of one model. Raises: ConfigError."""
    faults = ErrorCollector()
    parsed: dict[str, LLMConfig] = {}
    for name in (PREFILL, DECODE):
        with faults.collecting():
            if name not in values:
                raise location.fault(f"{name} is missing: {PREFILL} and {DECODE} belong together.")
            parsed[name], *more = _models(values[name], location / name, {}, faults)
            if more:
                raise location.fault(f"{name}: a model in two halves cannot have versions.")
    faults.raise_any()
    return parsed[DECODE].with_prefill(parsed[PREFILL])


def _models(
    entry: Any, location: Location, seen: dict[str, Location], faults: ErrorCollector
) -> list[LLMConfig]:
    """One model, or its versions. An id that is used twice is a fault beside those inside."""
    values = entry
    if isinstance(entry, str):
        values, location = _from_file(entry, location, faults)
    elif isinstance(entry, LLMConfig):
        location = entry.location
    where = location / "model_loading_config" / "model_id"
    _see(_model_id(values), where, seen, faults)
    config = values if isinstance(values, LLMConfig) else LLMConfig.parse(values, location)
    models = with_versions(config, location)
    for one in models:
        if one.model_id != config.model_id:
            _see(one.model_id, one.location / "name", seen, faults)
    return models


def _see(model_id: str | None, where: Location, seen: dict[str, Location], faults: ErrorCollector) -> None:
    first = seen.setdefault(model_id, where) if model_id is not None else where
    if first is not where:
        is_made = "versions" in (*where.path, *first.path)
        made = " A version makes the id MODEL@NAME." if is_made else ""
        text = f"{model_id!r} is used twice; model ids must differ. First: {first}.{made}"
        faults.found.append(where.says(text))


def _from_file(name: str, location: Location, faults: ErrorCollector) -> tuple[Any, Location]:
    try:
        folder = File(location.file).parent if location.file else None
        return yaml_source.read(name, folder, twice=faults.found)
    except ConfigError as error:
        if error.problems:
            raise
        raise location.fault(str(error)) from error


def _model_id(values: Any) -> str | None:
    if isinstance(values, LLMConfig):
        return values.model_id
    try:
        model_id = values["model_loading_config"]["model_id"]
    except (TypeError, KeyError):
        return None
    return model_id if isinstance(model_id, str) else None
