"""What a job was asked to do: kept beside its output, so that any machine can go on with it.

Read by the job and by what it is made of. What is kept of it is `record.public`: no secret, and nothing of
this machine but paths.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.data.job.prefix import Waiting, beginning
from penstock.data.rows.builder import build_request
from penstock.data.rows.digest import is_deterministic, request_digest
from penstock.data.rows.request import Kind, Request, Task
from penstock.data.rows.template import PromptTemplate
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.data.storage.readers import InputRow
from penstock.errors import BadRequest, ConfigError

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


class Asking:
    """Makes requests of rows: the same ones in every run of a job."""

    def __init__(self, order: Order) -> None:
        """columns: that the template names. Raises: ConfigError for options that do not go together."""
        self._order, self._task = order, order.task()
        if order.template is not None and order.kind == "score":
            raise ConfigError("--prompt does not go with --task score: rows need 'text_1' and 'text_2'.")
        if order.system is not None and order.template is None:
            raise ConfigError("--system goes with --prompt; rows with messages have their own.")
        if order.kind != "generate" and (order.system is not None or not order.chat):
            what = "--system" if order.system is not None else "--no-chat"
            raise ConfigError(f"{what} has no effect with --task {order.kind}; leave it out.")
        if order.lines and (order.defaults or order.template is not None):
            what = "--prompt" if order.template is not None else "--param and --max-tokens"
            raise ConfigError(
                f"{what}: no effect on OpenAI's batch lines, whose bodies are sent as they are."
            )
        self._template: PromptTemplate | None = None
        if order.template is not None:
            self._template = PromptTemplate(
                order.template, kind=order.kind, system=order.system, chat=order.chat
            )
        self.columns = self._template.columns if self._template is not None else frozenset[str]()
        self._salt = msgspec.json.encode((order.kind, _who(order.engines)))

    def waiting(self, row: InputRow) -> Waiting | None:
        """The row as one that waits; None for one that is skipped, for all that --prompt names is empty.

        Raises: Error, with why it cannot be asked.
        """
        if row.fields is None:
            raise BadRequest(row.fault or "The row cannot be read.")
        template = self._template
        if template is not None and template.is_blank(row.fields):
            return None
        fields = row.fields if template is None else template.fields(row.fields)
        request = build_request(fields, self._task, self._order.defaults)
        begin = beginning(request) if self._order.group_prefixes else b""
        return Waiting(row.number, request, self._key(request), 0, begin)

    def _key(self, request: Request) -> str | None:
        if self._order.reuse == "off" or request.prompt is not None:
            return None
        if self._order.reuse == "exact" and not is_deterministic(request):
            return None
        return request_digest(request, self._salt)


def _who(engines: Engines) -> tuple[str | None, ...]:
    """Whose answers they are: another model's do not count."""
    if engines.words:
        return (*engines.words, engines.engine)
    return ("served", engines.model) if engines.model else (engines.url, engines.app, engines.deployment)
