"""What a job is to do. Stored beside its output, so that any machine can resume it.

`manifest.redacted` is the form on disk: without secrets, and with nothing of this machine but paths. Field
names there are those of `rename`, which journals of older versions have, too.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.data.rows.request import Kind, Task
from penstock.data.storage.paths import StoragePath, storage_path

Reuse = Literal["exact", "all", "off"]


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename={"cli_args": "words"}):
    """Which engines answer. One of: cli_args (model or config, and flags, as for `penstock serve`), url, app.

    config: what a config from Python says beyond model and source, as JSON. answers: `engine_identity` of the
    engines to start; None before a config is read.
    replicas: engines to start; 0 for the number in the config. concurrency: parallel requests to a URL.
    """

    cli_args: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    answers: dict[str, Any] | None = None
    engine: str | None = None
    accelerator: str | None = None
    address: str | None = None
    replicas: int = 0
    url: str | None = None
    app: str | None = None
    deployment: str | None = None
    model: str | None = None
    concurrency: int = 64

    @property
    def identity(self) -> dict[str, Any]:
        """What answers depend on. All else can change without changing them."""
        if self.url is None and self.app is None:
            return self.answers or {}
        if self.model is not None:
            return {"served model": self.model}
        return {"url": self.url, "app": self.app, "deployment": self.deployment}


class JobSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    rename={"is_openai_batch": "lines", "max_attempts": "attempts"},
):
    """inputs: files, folders, globs. output: a file, or a folder if it ends with "/".

    is_openai_batch: input lines are in OpenAI's batch format. template: a prompt with columns in braces.
    chat: whether the prompt becomes a chat message; prompts_as_messages: the same for rows' own `prompt`.
    defaults: request fields for rows that do not set them.
    reuse: which answers also serve identical requests (`is_deterministic`).
    read_files: whether to read files that rows name; False for rows from untrusted sources.
    answer_column: name of the column for answers; then every row is in the output, and no other result.
    part_rows: input rows per file of an output folder. own_paths: endpoints of the user's server class
    that batch lines may name.
    """

    inputs: tuple[str, ...]
    output: str
    engines: EngineSpec = EngineSpec()
    input_form: str | None = None
    answer_column: str | None = None
    kind: Kind = "generate"
    is_openai_batch: bool = False
    template: str | None = None
    system: str | None = None
    chat: bool = True
    prompts_as_messages: bool = False
    defaults: dict[str, Any] = {}
    group_prefixes: bool = True
    reuse: Reuse = "exact"
    reuse_from: str | None = None
    max_attempts: int = 3
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

    @property
    def completes_prompts(self) -> bool:
        """Whether texts are sent as plain prompts."""
        as_messages = self.prompts_as_messages if self.template is None else self.chat
        return self.kind == "generate" and not self.is_openai_batch and not as_messages

    def task(self) -> Task:
        own_paths = frozenset(self.own_paths)
        return Task(
            self.kind, self.engines.model, token_ids=False, read_files=self.read_files, own_paths=own_paths
        )
