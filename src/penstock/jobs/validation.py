"""The lines of a batch's input, checked before the first one runs: every fault, with its line.

Source: OpenAI's Batch API, "input file". Reads line by line, on a thread.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import msgspec

from penstock.config.schema.jobs import JobsConfig
from penstock.data.storage.paths import StoragePath, open_lines
from penstock.errors import BadRequest, EndpointNotSupported, Error
from penstock.jobs.records import Fault

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/classify",
)
"""Endpoints of batches."""

Resolve = Callable[[str | None, bytes], tuple[str, str]]
"""The model's id and the adapter that a name means; "" for none. The body says which of its versions, where
requests of a user or session stay with one. Raises: Error."""

OwnEndpoints = Mapping[str, frozenset[str]]
"""Endpoints of users' server classes that batches may ask, with the ids of the models that have them."""

_EMBEDDINGS, _MOST_INPUTS = "/v1/embeddings", 50_000
_MOST_FAULTS = 1000
_ID_CHARS = 512
_BUFFER_BYTES = 1 << 20


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    background: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_line = msgspec.json.Decoder(_Line).decode
_body = msgspec.json.Decoder(_Body).decode


def check_input(
    at: StoragePath,
    endpoint: str,
    resolve: Resolve,
    config: JobsConfig,
    line_bytes: int,
    having: frozenset[str] | None = None,
) -> CheckedInput:
    """Blocks. line_bytes: limit of a line. having: models that have the endpoint; None for all.

    Raises: Unavailable, SourceNotFound, OSError.
    """
    found = CheckedInput(endpoint, resolve, having)
    for number, line in _lines(at, line_bytes):
        if line is not None and not line:
            continue
        found.lines += 1
        if found.lines > config.max_batch_lines:
            text = f"The file has more than {config.max_batch_lines:,} requests, the limit for one batch."
            found.faults.append(Fault("too_many_requests", text))
            break
        if (fault := found.fault(number, line, line_bytes)) is None:
            continue
        if len(found.faults) == _MOST_FAULTS:
            text = "More lines are at fault; correct these first."
            found.faults.append(Fault("more_faults", text, line=number))
            break
        found.faults.append(fault)
    if not found.lines:
        found.faults.append(Fault("empty_file", "The file has no requests."))
    if found.inputs > _MOST_INPUTS:
        text = f"The file has {found.inputs:,} inputs; a batch of embeddings may have {_MOST_INPUTS:,}."
        found.faults.append(Fault("too_many_inputs", text))
    return found


def _lines(at: StoragePath, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Each line with its number, without blanks around it; None for one that is longer than `most`."""
    with open_lines(at) as file:
        number = 0
        while line := file.readline(most + 2):
            number += 1
            whole = line.endswith(b"\n") or len(line) < most + 2
            while not whole:
                rest = file.readline(_BUFFER_BYTES)
                whole, line = rest.endswith(b"\n") or not rest, b""
            yield number, line.strip().removeprefix(codecs.BOM_UTF8) if line else None


class CheckedInput:
    """What an input holds. lines: requests. inputs: of embeddings. models: ids of those that they name."""

    def __init__(self, endpoint: str, resolve: Resolve, having: frozenset[str] | None) -> None:
        self.lines = self.inputs = 0
        self.models: set[str] = set()
        self.faults: list[Fault] = []
        self._endpoint, self._resolve, self._having = endpoint, resolve, having
        self._known: dict[str | None, Error | None] = {}
        self._first: dict[bytes, int] = {}

    def fault(self, number: int, line: bytes | None, most: int) -> Fault | None:
        """What is wrong with a line, if anything."""
        if line is None:
            return Fault("line_too_long", f"The line is longer than {most:,} bytes.", line=number)
        try:
            self._check(number, _line(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            is_json = isinstance(error, msgspec.ValidationError)
            text = "The line must be a JSON object." if is_json else "The line is not valid JSON."
            return Fault("invalid_json_line", text, line=number)
        except Error as error:
            code, param = error.facts.get("code", error.code), error.facts.get("param")
            return Fault(str(code), str(error), None if param is None else str(param), number)
        return None

    def _check(self, number: int, line: _Line) -> None:
        """Raises: Error."""
        self._check_id(number, line.custom_id)
        if line.method != "POST":
            raise _invalid("method", "method must be 'POST'.", "invalid_method")
        if line.url != self._endpoint:
            text = f"url is {str(line.url)[:80]!r}, but the batch's endpoint is '{self._endpoint}'."
            raise _invalid("url", text, "mismatched_endpoint")
        try:
            body = _body(line.body)
        except msgspec.ValidationError as error:
            raise _invalid("body", "body must be a JSON object: the request.", "invalid_body") from error
        if body.stream:
            raise _invalid("body.stream", "Requests of a batch do not stream; leave stream out.", "stream")
        if body.background:
            text = "Requests of a batch are answered in it; leave background out."
            raise _invalid("body.background", text, "background")
        if body.model is not None and not isinstance(body.model, str):
            raise _invalid("body.model", "model must be a string.", "invalid_model")
        self._check_model(body.model)
        if self._endpoint == _EMBEDDINGS:
            self.inputs += _inputs(body.input)

    def _check_id(self, number: int, custom_id: Any) -> None:
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _ID_CHARS:
            text = f"custom_id must be a string of 1 to {_ID_CHARS} characters."
            raise _invalid(
                "custom_id", text, "missing_custom_id" if custom_id is None else "invalid_custom_id"
            )
        first = self._first.setdefault(custom_id.encode(errors="surrogatepass"), number)
        if first != number:
            text = f"custom_id {custom_id[:80]!r} is that of line {first}, too."
            raise _invalid("custom_id", text, "duplicate_custom_id")

    def _check_model(self, name: str | None) -> None:
        if name not in self._known:
            try:
                self.models.add(self._model(name))
                self._known[name] = None
            except Error as error:
                self._known[name] = error
        if (error := self._known[name]) is not None:
            raise _invalid("body.model", str(error), error.code)

    def _model(self, name: str | None) -> str:
        """The id of a model that has the endpoint. Raises: Error."""
        model, _ = self._resolve(name, b"")
        if self._having is not None and model not in self._having:
            raise EndpointNotSupported(f"Model '{model}' has no endpoint '{self._endpoint}'.")
        return model


def _inputs(given: msgspec.Raw) -> int:
    """How many texts, or lists of tokens, a request for embeddings holds."""
    value = msgspec.json.decode(given)
    if not isinstance(value, list):
        return 1
    items = cast("list[Any]", value)
    return len(items) if items and not isinstance(items[0], int) else 1


def _invalid(param: str, message: str, code: str) -> BadRequest:
    return BadRequest(message, param=param, code=code)
