"""From what users hand over (a path, a mapping, a list of either) to configs.

Three forms of YAML: one model, the arguments of a builder (`llm_configs:`, or `llm_config:` for one), and
Serve's `applications:`. One error has all faults of all files.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import Field, field_validator

from penstock.config.loading import yaml_source
from penstock.config.loading.serving_args import FORMS, LLMServingArgs
from penstock.config.messages.location import Location
from penstock.config.messages.problems import ErrorCollector, nearest, unknown
from penstock.config.schema.env_vars import layered
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.strict import RootConfig, StrictModel, optional, setting

One: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | LLMConfig"


_BUILDERS = ("build_openai_app", "build_pd_openai_app", "build_dp_openai_app")
_MODULES = ("penstock.serve", "penstock.serve.builders")

SERVE_ONLY_IN_FILE = {
    *("controller_options", "grpc_options", "http_options", "logging_config", "target_capacity"),
    "tracing_config",
}
SERVE_ONLY_IN_APPLICATION = {
    *("autoscaling_policy", "external_scaler_enabled", "host", "logging_config", "port", "route_prefix"),
}
"""Settings that Ray Serve alone obeys."""


@dataclass(frozen=True, slots=True)
class Application:
    """One Serve application: its name, and its models with their gateway.

    serve_only: a sentence for each setting of its file that Ray Serve alone obeys.
    """

    name: str
    args: LLMServingArgs
    serve_only: tuple[str, ...] = ()


class ServeApplication(StrictModel):
    """One entry of `applications:`."""

    name: str = setting("default", "Name of the application.", min_length=1)
    import_path: str = Field(description="`penstock.serve.builders:build_openai_app`.")
    args: dict[str, Any] = setting({}, "Arguments of the builder: `llm_configs`, `gateway`, ...")
    runtime_env: dict[str, Any] = setting({}, "Ray's runtime environment of the builder.")
    deployments: list[Any] = setting([], "Refused: use `deployment_config` of the model.")

    @field_validator("import_path")
    @classmethod
    def _one_of_ours(cls, path: str) -> str:
        module, _, builder = path.replace(":", ".").rpartition(".")
        if module not in _MODULES or builder not in _BUILDERS:
            raise ValueError(f"{path!r} is not a builder of Penstock; write penstock.serve:build_openai_app.")
        return path

    @field_validator("deployments")
    @classmethod
    def _in_the_models(cls, overrides: list[Any]) -> list[Any]:
        if overrides:
            raise ValueError("must not be set; put these options into the models' `deployment_config`.")
        return overrides


class ServeFile(RootConfig):
    """The file that `serve run` and `serve deploy` take."""

    applications: list[ServeApplication] = Field(min_length=1, description="The applications.")
    proxy_location: Any = optional("Serve's own proxy; a gateway with a port needs none.")


def load_configs(given: One | Sequence[One]) -> list[LLMConfig]:
    """All models of a YAML file, a mapping, an LLMConfig, or a list of these.

    Raises: ConfigError with every fault, each with its file, line and path.
    """
    return [config for application in load_applications(given) for config in application.args.llm_configs]


def load_applications(given: One | Sequence[One]) -> list[Application]:
    """The same by application, with its gateway. What names no application becomes one called "default".

    Raises: ConfigError with every fault, each with its file, line and path.
    """
    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    reading = _Reading()
    found: list[Application] = []
    for one in several:
        with reading.faults.collecting():
            found += reading.applications(one)
    reading.faults.raise_any()
    return found


class _Reading:
    """One call of `load_applications`: its faults, and the model ids seen so far."""

    def __init__(self) -> None:
        self.faults = ErrorCollector()
        self.seen: dict[str, Location] = {}

    def applications(self, given: Any) -> list[Application]:
        data, location = given, Location()
        if isinstance(given, str | os.PathLike):
            data, location = yaml_source.read(given, twice=self.faults.found)
        if isinstance(data, Mapping) and "applications" in data:
            return self._serve_file(data, location)
        if isinstance(data, Mapping) and not data.keys().isdisjoint(FORMS):
            return [Application("default", LLMServingArgs.parse(data, location, self.seen))]
        if isinstance(data, Mapping) and "model_loading_config" not in data:
            for key in map(str, data):
                if key not in LLMConfig.model_fields and nearest(key, FORMS):
                    raise (location / key).fault(unknown("key", key, FORMS))
        config = data if isinstance(data, LLMConfig) else LLMConfig.parse(data, location)
        alone = LLMServingArgs.parse({"llm_configs": [config]}, location, self.seen)
        return [Application("default", alone)]

    def _serve_file(self, data: Mapping[str, Any], location: Location) -> list[Application]:
        ours, serve_only = _split(data, SERVE_ONLY_IN_FILE, location)
        found: list[Application] = []
        entries: list[Any] = []
        for i, entry in enumerate(ours["applications"] if isinstance(ours["applications"], list) else []):
            if isinstance(entry, Mapping):
                where = location / "applications" / i
                entry, more = _split(entry, SERVE_ONLY_IN_APPLICATION, where)
                if isinstance(entry.get("args"), Mapping):
                    found += self._application(entry, where, (*serve_only, *more))
            entries.append(entry)
        with self.faults.collecting():
            ServeFile.parse({**ours, "applications": entries} if entries else ours, location)
        return found

    def _application(
        self, entry: Mapping[str, Any], location: Location, serve_only: tuple[str, ...]
    ) -> list[Application]:
        with self.faults.collecting():
            args = LLMServingArgs.parse(entry["args"], location / "args", self.seen)
            if isinstance(shared := entry.get("runtime_env"), Mapping):
                models = [_inside(config, shared) for config in args.llm_configs]
                args = args.model_copy(update={"llm_configs": models})
            return [Application(entry.get("name", "default"), args, serve_only)]
        return []


def _inside(config: LLMConfig, runtime_env: Mapping[str, Any]) -> LLMConfig:
    """The model in its application's runtime environment, as Serve starts it."""
    options = config.deployment_config
    actor = dict(options.get("ray_actor_options") or {})
    actor["runtime_env"] = layered(runtime_env, actor.get("runtime_env"))
    return config.model_copy(update={"deployment_config": {**options, "ray_actor_options": actor}})


def _split(
    values: Mapping[str, Any], serve_only: set[str], location: Location
) -> tuple[dict[str, Any], list[str]]:
    """The values without those that Ray Serve alone obeys, and a sentence for each that says something."""
    ours = {name: value for name, value in values.items() if name not in serve_only}
    given = [(name, values[name]) for name in sorted(serve_only & values.keys())]
    # Serve's defaults say nothing: `external_scaler_enabled: false`, `route_prefix: /`.
    said = [name for name, value in given if value is not None and value is not False and value != "/"]
    return ours, [
        (location / name).says("only Ray Serve obeys it (`serve run`, `serve deploy`).") for name in said
    ]
