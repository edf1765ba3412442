"""Turns the arguments of `penstock serve` into configs. Needs neither Ray nor an engine.

Only the engine's own parser knows which of its arguments take a value, so `ServePlan` holds those as strings;
`read_engine_words` parses them while Ray starts.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import urlsplit

from penstock.cli.models.options import ACCELERATOR_KINDS, DEFAULT_PORT, YAML, Arguments
from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs, Settings, load_applications
from penstock.config.derive import names
from penstock.config.messages.location import Location
from penstock.config.messages.problems import config_error
from penstock.config.schema.model import DEMO_MODEL_ID, DEMO_SOURCE
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is to be served, but for the `engine_words` that the engine's parser has yet to read."""

    serving: LLMServingArgs
    engine_words: tuple[str, ...] = ()
    serve_only: tuple[str, ...] = ()

    def refuse_serve_only(self) -> None:
        """Raises: ConfigError for each setting that would be dropped, as Ray Serve alone obeys it."""
        if self.serve_only:
            raise config_error(f"{text} Leave it out." for text in self.serve_only)

    @property
    def configs(self) -> list[LLMConfig]:
        return self.serving.llm_configs

    @property
    def gateway(self) -> GatewayConfig:
        return self.serving.gateway

    def in_folders(self, folders: Mapping[str, str]) -> Self:
        """The same, where models that no file describes have another name of their folder."""
        models = [
            config.with_source(folders[config.model_source])
            if config.model_source in folders and not config.location.lines
            else config
            for config in self.configs
        ]
        return self._with(llm_configs=models)

    def with_engine_arguments(self, read: Mapping[str, Any]) -> Self:
        """The same with arguments of the engine on top of the only model's own."""
        (config,) = self.configs
        merged = {**config.engine_kwargs, **read}
        return replace(self._with(llm_configs=[_changed(config, engine_kwargs=merged)]), engine_words=())

    def _with(self, **changes: Any) -> Self:
        return replace(self, serving=self.serving.model_copy(update=changes))


def make_plan(arguments: Arguments) -> ServePlan:
    """Everything checked that can be checked without an engine.

    Raises: ConfigError with every fault of every file at once.
    """
    applications = load_applications([_source(word, arguments) for word in arguments.sources or ("",)])
    configs = [
        _overridden(config, arguments)
        for application in applications
        for config in application.args.llm_configs
    ]
    if problems := names.problems(configs):
        raise config_error(problems)
    of_one = "--served-model-name" if arguments.served_model_name else "".join(arguments.engine_words[:1])
    if of_one and len(configs) > 1:
        ids = ", ".join(config.model_id for config in configs)
        raise ConfigError(f"{of_one} applies to one model, but {len(configs)} are given ({ids}).")
    if arguments.watch and not any(map(is_file, arguments.sources)):
        raise ConfigError("--watch needs a config file to watch.")
    gateway = _gateway([application.args.gateway for application in applications], arguments)
    rest = _rest([application.args for application in applications])
    with_gateway = (one.args.location for one in applications if "gateway" in one.args.model_fields_set)
    serving = LLMServingArgs(llm_configs=configs, gateway=gateway, **rest).at(next(with_gateway, Location()))
    serve_only = tuple(dict.fromkeys(text for one in applications for text in one.serve_only))
    return ServePlan(serving, arguments.engine_words, serve_only)


def _source(word: str, arguments: Arguments) -> str | dict[str, Any]:
    """A file's name as it is; a model as the config that it stands for."""
    if is_file(word):
        if arguments.served_model_name:
            raise ConfigError(
                f"--served-model-name names a model given by id or folder; {word} names its own."
            )
        return word
    source = word or DEMO_SOURCE
    model_id = arguments.served_model_name or (DEMO_MODEL_ID if source == DEMO_SOURCE else _id_of(source))
    repeats = source == model_id and source not in (DEMO_SOURCE, DEMO_MODEL_ID)
    loading = {"model_id": model_id} | ({} if repeats else {"model_source": source})
    values: dict[str, Any] = {"model_loading_config": loading}
    if arguments.engine:
        values["llm_engine"] = arguments.engine
    return values


def is_file(word: str) -> bool:
    """Whether a word names a config file, else it names a model."""
    return word.endswith(YAML) or os.path.isfile(word)


def _id_of(source: str) -> str:
    """A folder, or a link to one, is served under its own name, wherever it is; a hub id as it is."""
    if "://" in source:
        return PurePosixPath(urlsplit(source).path).name or source
    is_path = source.startswith(("/", "./", "../", "~")) or os.path.isdir(source)
    return Path(os.path.abspath(source)).name if is_path else source


def _overridden(config: LLMConfig, arguments: Arguments) -> LLMConfig:
    changes: dict[str, Any] = {}
    if arguments.engine:
        changes["llm_engine"] = arguments.engine
    if arguments.accelerator and arguments.accelerator not in ACCELERATOR_KINDS:
        changes["accelerator_type"] = arguments.accelerator
    if arguments.replicas:
        kept = {
            name: value for name, value in config.deployment_config.items() if name != "autoscaling_config"
        }
        changes["deployment_config"] = {**kept, "num_replicas": arguments.replicas}
    return _changed(config, **changes) if changes else config


def _gateway(given: Sequence[GatewayConfig], arguments: Arguments) -> GatewayConfig:
    """The files' settings, then the command's. Files that disagree are an error."""
    values: dict[str, Any] = {}
    for gateway in given:
        for name in gateway.model_fields_set:
            value = getattr(gateway, name)
            if values.setdefault(name, value) != value:
                raise ConfigError(f"gateway.{name} is {values[name]!r} in one file and {value!r} in another.")
    values.setdefault("port", DEFAULT_PORT)
    values.setdefault("log_format", Settings.read().log_format)
    return GatewayConfig(**values | gateway_options(arguments))


def gateway_options(arguments: Arguments) -> dict[str, Any]:
    """What the command says of the gateway. Raises: ConfigError."""
    names = ("host", "port", "api_key", "log_format")
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.tls_cert or arguments.tls_key:
        if not (arguments.tls_cert and arguments.tls_key):
            raise ConfigError("--tls-cert and --tls-key belong together; give both.")
        values["tls"] = {"cert": arguments.tls_cert, "key": arguments.tls_key}
    return values


def _rest(given: Sequence[LLMServingArgs]) -> dict[str, Any]:
    """What the files set beside models and gateway. Files that disagree are an error."""
    values: dict[str, Any] = {}
    for args in given:
        if args.ingress_cls_config.ingress_cls is not None:
            where = args.location / "ingress_cls_config"
            raise where.fault(
                "`penstock serve` runs the gateway on a port of its own, where a class in its place "
                "cannot answer; run such a file with `serve run`, or take `endpoint` of a server class."
            )
        for name in sorted(args.model_fields_set - {"llm_configs", "gateway"}):
            value = getattr(args, name)
            if values.setdefault(name, value) != value:
                raise ConfigError(f"{name} is not the same in all files; set it in one of them.")
    return values


def _changed(config: LLMConfig, **changes: Any) -> LLMConfig:
    """A copy with these fields, checked like the original and remembering its location."""
    values = {name: getattr(config, name) for name in config.model_fields_set}
    return LLMConfig.parse({**values, **changes}, config.location)
