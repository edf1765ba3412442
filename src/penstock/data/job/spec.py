"""What a job is to do. Stored beside its output, so that any machine can resume it.

`manifest.redacted` is the form on disk: without secrets, and with nothing of this machine but paths. Field
names there are those of `rename`, which journals of older versions have, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.data.backends.engine_config import SPEED_ONLY
from penstock.data.rows.request import Kind, Task
from penstock.data.storage.paths import StoragePath, storage_path

Reuse = Literal["exact", "all", "off"]

_ANSWER_FIELDS = (
    "model_loading_config",
    "llm_engine",
    "lora_config",
    "engine_kwargs",
    "preprocessor",
    "preprocessor_options",
    "postprocessor",
    "postprocessor_options",
)
"""Fields of a config that answers depend on."""

_FLAG = re.compile(r"--?[a-zA-Z]")
_encode = msgspec.json.Encoder(order="sorted").encode


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"cli_args": "words"}):
    """Which engines answer. One of: cli_args (model or config, and flags, as for `penstock serve`), url, app.

    config: what a config from Python says beyond model and source, as JSON.
    replicas: engines to start; 0 for the number in the config. concurrency: parallel requests to a URL.
    """

    cli_args: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    engine: str | None = None
    served_model_name: str | None = None
    accelerator: str | None = None
    address: str | None = None
    replicas: int = 0
    url: str | None = None
    app: str | None = None
    deployment: str | None = None
    model: str | None = None
    concurrency: int = 64

    @property
    def identity(self) -> str:
        """The model or service, in words."""
        if self.cli_args:
            source = self.cli_args[1] if self._is_from_python() else self.cli_args[0]
            origin = f" from '{source}'" if source != self.cli_args[0] else ""
            return f"the model '{self.cli_args[0] or self.engine}'{origin}"
        if self.model is not None:
            return f"the model '{self.model}' of a service"
        return f"the service '{self.url or self.app}'" + (f" ({self.deployment})" if self.deployment else "")

    @property
    def fingerprint(self) -> bytes:
        """Everything that answers depend on. All else can change without changing answers."""
        if self.cli_args:
            return _encode((_answer_args(self.cli_args), self.engine, _answer_config(self.config or {})))
        return _encode(("served", self.model) if self.model else (self.url, self.app, self.deployment))

    def _is_from_python(self) -> bool:
        return len(self.cli_args) > 1 and not _FLAG.match(self.cli_args[1])


def _answer_args(cli_args: tuple[str, ...]) -> list[str]:
    """Without flags that only change the engine's speed, and their values."""
    found: list[str] = []
    is_speed_only = False
    for argument in cli_args:
        if _FLAG.match(argument):
            name = argument.lstrip("-").partition("=")[0].removeprefix("no-")
            is_speed_only = name.replace("-", "_") in SPEED_ONLY
        if not is_speed_only:
            found.append(argument)
    return found


def _answer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: config[name] for name in _ANSWER_FIELDS if name in config}
    kwargs = found.get("engine_kwargs") or {}
    return {**found, "engine_kwargs": {name: kwargs[name] for name in kwargs if name not in SPEED_ONLY}}


class JobSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"is_openai_batch": "lines", "max_attempts": "attempts", "max_deaths": "deaths"},
):
    """inputs: files, folders, globs. output: a file, or a folder if it ends with "/".

    is_openai_batch: input lines are in OpenAI's batch format. template: a prompt with columns in braces.
    chat: whether the prompt becomes a chat message. defaults: request fields for rows that do not set them.
    reuse: which answers also serve identical requests (`is_deterministic`).
    read_files: whether to read files that rows name; False for rows from untrusted sources.
    part_rows: input rows per file of an output folder. own_paths: endpoints of the user's server class
    that batch lines may name.
    """

    inputs: tuple[str, ...]
    output: str
    engines: EngineSpec = EngineSpec()
    input_form: str | None = None
    kind: Kind = "generate"
    is_openai_batch: bool = False
    template: str | None = None
    system: str | None = None
    chat: bool = True
    defaults: dict[str, Any] = {}
    group_prefixes: bool = True
    reuse: Reuse = "exact"
    reuse_from: str | None = None
    max_attempts: int = 3
    max_deaths: int = 3
    deadline_s: float | None = None
    limit: int | None = None
    part_rows: int = 50_000
    read_files: bool = True
    own_paths: tuple[str, ...] = ()

    @property
    def output_path(self) -> StoragePath:
        return storage_path(self.output.rstrip("/") if self.is_folder else self.output)

    @property
    def is_folder(self) -> bool:
        return self.output.endswith("/")

    @property
    def journal(self) -> StoragePath:
        return self.output_path.with_added_suffix(".journal")

    def task(self) -> Task:
        own_paths = frozenset(self.own_paths)
        return Task(
            self.kind, self.engines.model, token_ids=False, read_files=self.read_files, own_paths=own_paths
        )
