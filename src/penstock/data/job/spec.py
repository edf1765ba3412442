"""What a job was asked to do: kept beside its output, so that any machine can go on with it.

Read by the job and by what it is made of. What is kept of it is `record.public`: no secret, and nothing of
this machine but paths.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.data.job.prefix import Waiting, beginning
from penstock.data.rows.builder import request_of
from penstock.data.rows.request import Request, digest
from penstock.data.rows.task import Kind, Task
from penstock.data.storage.paths import Place, place
from penstock.data.storage.readers import Row
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
    requests where a row is silent. reuse: whose answers count for identical requests (see `reusable`).
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
    def where(self) -> Place:
        return place(self.output.rstrip("/") if self.folder else self.output)

    @property
    def folder(self) -> bool:
        return self.output.endswith("/")

    @property
    def journal(self) -> Place:
        return self.where.beside(".journal")

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
        self.columns = _columns(order.template) if order.template is not None else frozenset[str]()
        self._salt = msgspec.json.encode((order.kind, _who(order.engines)))

    def waiting(self, row: Row) -> Waiting | None:
        """The row as one that waits; None for one that is skipped, for all that --prompt names is empty.

        Raises: Error, with why it cannot be asked.
        """
        if row.fields is None:
            raise BadRequest(row.fault or "The row cannot be read.")
        if self.columns and all(_empty(row.fields.get(name, row)) for name in self.columns):
            return None
        request = request_of(self._fields(row.fields), self._task, self._order.defaults)
        begin = beginning(request) if self._order.group_prefixes else b""
        return Waiting(row.number, request, self._key(request), 0, begin)

    def _fields(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        template, order = self._order.template, self._order
        if template is None:
            return fields
        if missing := self.columns - fields.keys():
            raise BadRequest(
                f"The prompt names the column {min(missing)!r}; the row has {', '.join(map(str, fields))}."
            )
        try:
            text = _FORMATTER.vformat(template, (), fields)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            why = f"there is no {error}" if isinstance(error, LookupError) else str(error)
            raise BadRequest(f"The prompt cannot be made of the row: {why}.") from error
        if order.kind != "generate":
            return {"input": text}
        if not order.chat:
            return {"prompt": (order.system or "") + text}
        system = [{"role": "system", "content": order.system}] if order.system is not None else []
        return {"messages": [*system, {"role": "user", "content": text}]}

    def _key(self, request: Request) -> str | None:
        if self._order.reuse == "off" or request.prompt is not None:
            return None
        if self._order.reuse == "exact" and not reusable(request):
            return None
        return digest(request, self._salt)


def _who(engines: Engines) -> tuple[str | None, ...]:
    """Whose answers they are: another model's do not count."""
    if engines.words:
        return (*engines.words, engines.engine)
    return ("served", engines.model) if engines.model else (engines.url, engines.app, engines.deployment)


class _Sampling(msgspec.Struct):
    temperature: float | None = None
    seed: int | None = None


_sampling = msgspec.json.Decoder(_Sampling).decode
_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def reusable(request: Request) -> bool:
    """Whether the same request would get the same answer: nothing is drawn, or by a seed of its own."""
    if request.path not in _GENERATING:
        return True
    try:
        body = _sampling(request.body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False
    return body.temperature == 0 or body.seed is not None


def _empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


class _Formatter(string.Formatter):
    """Columns that are no text are written as JSON; what a row lacks (null) is empty."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return value if value is None else super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            return ""
        if isinstance(value, list | dict):
            value = msgspec.json.encode(value).decode()
        return super().format_field(value, format_spec)


_FORMATTER = _Formatter()


def _columns(template: str) -> frozenset[str]:
    """Names in braces. Raises: ConfigError."""
    try:
        names = [name for _, name, _, _ in _FORMATTER.parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"The prompt {template!r} is no template ({error}); write {{{{ for a brace."
        ) from error
    if not names or "" in names:
        raise ConfigError(
            f"The prompt {template!r} must name a column in braces, as in 'Summarise: {{text}}'."
        )
    return frozenset(name.partition(".")[0].partition("[")[0] for name in names)
