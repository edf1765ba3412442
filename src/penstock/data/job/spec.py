"""What a job was asked to do: kept beside its output, so that any machine can go on with it.

Read by the job and by what it is made of. What is kept of it is `record.public`: no secret, and nothing of
this machine but paths.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.data.rows.request import Kind, Task
from penstock.data.storage.paths import StoragePath, storage_path

Reuse = Literal["exact", "all", "off"]


class Engines(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who answers. One of: words (a model or a config, and flags, as of `penstock serve`), url, app.

    config: where words are a name and a source only, what else a config from Python says, as JSON.
    replicas: engines of one's own; 0 for what the config says. concurrency: requests at a time to a URL.
    """

    words: tuple[str, ...] = ()
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
        """Whose answers they are, in words: what may differ beside it changes no answer."""
        if self.words:
            return f"the model '{self.words[0] or self.engine}'"
        if self.model is not None:
            return f"the model '{self.model}' of a service"
        return f"the service '{self.url or self.app}'" + (f" ({self.deployment})" if self.deployment else "")


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """inputs: files, folders, globs. output: a file, or a folder where it ends with "/".

    template: a prompt with columns in braces. chat: whether it goes into a message. defaults: fields of
    requests where a row is silent. reuse: which answers serve identical requests, too (`is_deterministic`).
    lines: rows are lines of OpenAI's batch form. part_rows: rows of the input for each file of a folder.
    """

    inputs: tuple[str, ...]
    output: str
    engines: Engines = Engines()
    input_form: str | None = None
    kind: Kind = "generate"
    lines: bool = False
    template: str | None = None
    system: str | None = None
    chat: bool = True
    defaults: dict[str, Any] = {}
    group_prefixes: bool = True
    reuse: Reuse = "exact"
    reuse_from: str | None = None
    attempts: int = 3
    deaths: int = 3
    deadline_s: float | None = None
    limit: int | None = None
    part_rows: int = 50_000

    @property
    def where(self) -> StoragePath:
        return storage_path(self.output.rstrip("/") if self.folder else self.output)

    @property
    def folder(self) -> bool:
        return self.output.endswith("/")

    @property
    def journal(self) -> StoragePath:
        return self.where.with_added_suffix(".journal")

    def task(self) -> Task:
        return Task(kind=self.kind, model=self.engines.model, token_ids=False)
