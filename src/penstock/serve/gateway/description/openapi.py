"""`/openapi.json`: what this service answers, and nothing else.

Of each engine's own description it takes the endpoints that the gateway passes on, with the schemas that they
need; what the gateway answers itself is described here. Source: OpenAPI 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from penstock import __version__
from penstock.layers import generation
from penstock.openai.errors import Envelope
from penstock.serve.control import operations
from penstock.serve.gateway.description.answers import BATCH_SCHEMAS, BODIES, REFERENCE, STREAMED, answers

_REFERENCES = re.compile(rb'"\$ref":"%b([^"]*)' % REFERENCE.encode())  # in JSON
_PARAMETER = re.compile(r"\{[^}]*\}")
_GENERATES = "/v1/completions"

_OWN = {
    "/": "What this service is, and where things are",
    "/v1/models": "The models, their aliases and adapters",
    "/v1/models/{id}": "One model",
    "/health": "Whether every model can answer, with the counts of each",
    "/ping": "The same",
    "/readyz": "The same",
    "/livez": "Whether the gateway runs",
    "/-/healthz": "The same",
    "/version": "Versions of Penstock and of the engines",
    "/metrics": "Metrics in Prometheus' text format",
    "/docs": "This description as a page",
    "/openapi.json": "This description",
    "/v1/files": "Files: inputs of batches, and what batches wrote",
    "/v1/files/{id}": "One file",
    "/v1/files/{id}/content": "The content of a file, or a range of it",
    "/v1/batches": "Batches: many requests of one file, answered within their completion window",
    "/v1/batches/{id}": "One batch",
    "/v1/batches/{id}/cancel": "Cancels a batch; what was done is kept",
}
_KINDS = dict.fromkeys(("/livez", "/-/healthz", "/metrics"), "text/plain") | {
    "/docs": "text/html",
    "/v1/files/{id}/content": "application/octet-stream",
}


Document = Mapping[str, Any]


class Described(NamedTuple):
    """A model. document: its engine's own description; None when it has none now. own_paths: endpoints of
    its server class. names: that requests may give, each with `:adapter` behind it if it has `adapters`.
    """

    id: str
    document: Document | None
    own_paths: Sequence[str]
    names: Sequence[str]
    adapters: bool


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the gateway with its methods. by_engine: passed on. public: needs no key."""

    path: str
    methods: Sequence[str]
    by_engine: bool = False
    public: bool = False


def document(
    models: Sequence[Described],
    endpoints: Sequence[Endpoint],
    *,
    root: str,
    keyed: bool,
    administered: bool,
    has_default: bool,
) -> dict[str, Any]:
    """The whole description. root: the path under which clients reach the service.

    keyed, administered: whether there is an API key, and an admin key. has_default: whether requests need not
    name a model.
    """
    schemas = _Schemas()
    paths: dict[str, dict[str, Any]] = {}
    passed_on = {
        (_PARAMETER.sub("{}", one.path), method.lower()): one
        for one in endpoints
        if one.by_engine
        for method in one.methods
    }
    for model in models:
        for path, method, operation in _operations(model, passed_on.keys(), schemas):
            known = paths.setdefault(path, {}).setdefault(method, operation)
            known["x-models"].append(model.id)
    _name_models(paths, {model.id: model for model in models}, schemas, has_default)
    for one in endpoints:
        for method in () if one.by_engine else one.methods:
            paths.setdefault(one.path, {})[method.lower()] = _own(one, method)
    _describe_answers(paths, schemas)
    if administered:
        paths |= _administration()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": __version__, "description": _said(models)},
        "servers": [{"url": root or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.needed(paths),
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer"} for name in ("api_key", "admin_key")
            },
        },
        "security": [{"api_key": []}] if keyed else [],
    }


def _said(models: Sequence[Described]) -> str:
    silent = ", ".join(model.id for model in models if model.document is None)
    text = f"One gateway to {', '.join(model.id for model in models)}."
    more = f" The endpoints of {silent} are left out: no replica that describes them is ready."
    return text + (more if silent else "")


def _operations(
    model: Described, passed_on: Set[tuple[str, str]], schemas: _Schemas
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of each endpoint of a model."""
    document = model.document
    for path in model.own_paths:
        yield path, "post", _operation({"summary": f"An endpoint of {model.id}'s own", "requestBody": _BODY})
    if document is None:
        return
    renamed = schemas.add(document)
    for path, methods in document.get("paths", {}).items():
        for method, given in methods.items():
            if (_PARAMETER.sub("{}", path), method) in passed_on:
                yield path, method, _operation(renamed(given))
    if _GENERATES in document.get("paths", {}):
        yield generation.PATH, "post", _generation(schemas)


def _name_models(
    paths: Mapping[str, Mapping[str, Any]],
    models: Mapping[str, Described],
    schemas: _Schemas,
    has_default: bool,
) -> None:
    """Says in the bodies of requests to engines which models there are, and that one must be named."""
    silent = [model for model in models.values() if model.document is None]  # may have any endpoint
    asked: dict[str, dict[str, None]] = {}
    for operation in (one for methods in paths.values() for one in methods.values()):
        for name in _references(operation.get("requestBody")):
            asked.setdefault(name, {}).update(dict.fromkeys(operation["x-models"]))
    for name, ids in asked.items():
        schema = schemas.known.get(name, {})
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = _model_names([*(models[model_id] for model_id in ids), *silent])
            if not has_default:
                schema["required"] = [*dict.fromkeys([*schema.get("required", ()), "model"])]


def _model_names(models: Sequence[Described]) -> dict[str, Any]:
    names: dict[str, Any] = {"enum": [name for model in models for name in model.names]}
    bases = [re.escape(name) for model in models if model.adapters for name in model.names]
    if bases:
        names = {"anyOf": [names, {"pattern": f"^({'|'.join(bases)}):."}]}
    return {"title": "Model", "type": "string", **names}


def _describe_answers(paths: Mapping[str, Mapping[str, Any]], schemas: _Schemas) -> None:
    document, references = answers()
    renamed = schemas.add(document)
    for (path, method), reference in references.items():
        if operation := paths.get(path, {}).get(method):
            content = {"application/json": {"schema": renamed(reference)}}
            content |= {"text/event-stream": {}} if path in STREAMED else {}
            operation["responses"]["200"] = {"description": "The answer", "content": content}


_BODY = {"content": {"application/json": {"schema": {"type": "object"}}}}
_KEPT = ("summary", "description", "parameters", "requestBody")


def _operation(given: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's operation with our errors."""
    answer = given.get("responses", {}).get("200", {"description": "The answer"})
    return {
        **{name: given[name] for name in _KEPT if name in given},
        "tags": ["Models"],
        "responses": {"200": answer, "default": _ERROR},
        "x-models": [],
    }


def _own(endpoint: Endpoint, method: str) -> dict[str, Any]:
    kind = _KINDS.get(endpoint.path, "application/json")
    names = [name[1:-1] for name in _PARAMETER.findall(endpoint.path)]
    return {
        "summary": _OWN[endpoint.path],
        "tags": ["Service"],
        **({"parameters": [_in_path(name) for name in names]} if names else {}),
        **({"security": []} if endpoint.public else {}),
        **({"requestBody": BODIES[endpoint.path]} if method == "POST" and endpoint.path in BODIES else {}),
        "responses": {"200": {"description": "The answer", "content": {kind: {}}}, "default": _ERROR},
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _administration() -> dict[str, Any]:
    status = {"summary": "Desired and actual state of every replica"}
    named = {operation: {"summary": f"{operation} of the fleet"} for operation in operations.OPERATIONS}
    common = {
        "tags": ["Administration"],
        "security": [{"admin_key": []}],
        "responses": {"200": {"description": "What replicas answered"}, "default": _ERROR},
    }
    return {"/admin/status": {"get": status | common}} | {
        f"/admin/{operation}": {"post": said | {"requestBody": _BODY} | common}
        for operation, said in named.items()
    }


_ENVELOPE = msgspec.json.schema_components([Envelope], ref_template=REFERENCE + "{name}")[1]
_ERROR = {
    "description": "An error; on paths of Anthropic's Messages in their form",
    "content": {"application/json": {"schema": {"$ref": f"{REFERENCE}Envelope"}}},
}


def _generation(schemas: _Schemas) -> dict[str, Any]:
    (asked, answer), components = msgspec.json.schema_components(
        [generation.GenerateRequest, generation.GenerateResponse], ref_template=REFERENCE + "{name}"
    )
    schemas.known |= components
    body = {"content": {"application/json": {"schema": asked}}, "required": True}
    answers = {"200": {"description": "The answer", "content": {"application/json": {"schema": answer}}}}
    return _operation({"summary": "Tokens in, tokens out", "requestBody": body, "responses": answers})


@dataclass(slots=True)
class _Schemas:
    """Schemas of all engines. Those of one that differ under the same name get a number."""

    known: dict[str, Any] = field(default_factory=lambda: _ENVELOPE | BATCH_SCHEMAS)
    given: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    def add(self, document: Document) -> Callable[[Any], Any]:
        """Takes an engine's schemas; returns a function that renames what refers to them."""
        new = document.get("components", {}).get("schemas", {})
        if new not in self.given:
            self.given.append(new)
        number = self.given.index(new)
        earlier = self.given[:number]
        differs = any(one.get(name, schema) != schema for one in earlier for name, schema in new.items())
        suffix = str(number + 1) if differs else ""

        def renamed(value: Any) -> Any:
            text = _REFERENCES.sub(rb"\g<0>" + suffix.encode(), msgspec.json.encode(value))
            return msgspec.json.decode(text)

        self.known |= {name + suffix: renamed(schema) for name, schema in new.items()}
        return renamed

    def needed(self, paths: Mapping[str, Any]) -> dict[str, Any]:
        """Those that `paths` refer to, and those that these refer to."""
        found: dict[str, Any] = {}
        waiting = _references(paths)
        while waiting:
            name = waiting.pop()
            if name not in found and name in self.known:
                found[name] = self.known[name]
                waiting += _references(found[name])
        return dict(sorted(found.items()))


def _references(value: Any) -> list[str]:
    return [name.decode() for name in _REFERENCES.findall(msgspec.json.encode(value))]
