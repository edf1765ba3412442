"""`/openapi.json`: what this service answers, and nothing else.

Of each engine's own description it takes the endpoints that the gateway passes on, with the schemas that they
need; what the gateway answers itself is described here. Source: OpenAPI 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock import __version__
from penstock.jobs.batches import CreateBatch
from penstock.layers import generation
from penstock.openai.errors import Envelope
from penstock.serve.control import operations
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.routes import Route

_REFERENCE = "#/components/schemas/"
_STREAMED = {"/v1/chat/completions", "/v1/completions"}

_FILE = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["file", "purpose"],
}
_BATCH, _BATCH_SCHEMAS = msgspec.json.schema_components([CreateBatch], ref_template=_REFERENCE + "{name}")
_BODIES = {
    "/v1/files": {"content": {"multipart/form-data": {"schema": _FILE}}, "required": True},
    "/v1/batches": {"content": {"application/json": {"schema": _BATCH[0]}}, "required": True},
}
"""Of POST requests that the gateway answers itself."""

_REFERENCES = re.compile(rb'"\$ref":"%b([^"]*)' % _REFERENCE.encode())  # in JSON
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
_ADMINISTRATION = {
    "/admin/status": {"get": "Desired and actual state of every replica"},
    "/v1/organization/usage/completions": {"get": "Tokens and requests of tenants, as OpenAI's usage API"},
    "/v1/organization/usage/embeddings": {"get": "The same of embeddings"},
    "/v1/organization/usage/audio_transcriptions": {"get": "The same of transcriptions"},
    "/v1/organization/costs": {"get": "Costs of tenants, as OpenAI's costs API"},
    "/admin/fleet": {
        "get": "The fleet, its version, and what holds up a change of it",
        "put": "Changes the fleet; If-Match: only from that version",
    },
    "/admin/fleet/history": {"get": "The versions of the fleet, the newest first"},
    "/admin/fleet/audit": {"get": "Who has changed the fleet, keys and limits, the newest first"},
    "/admin/fleet/plan": {"post": "What a change of the fleet would do"},
    "/admin/fleet/rollback": {"post": "Brings an earlier version of the fleet again"},
}
_KINDS = dict.fromkeys(("/livez", "/-/healthz", "/metrics"), "text/plain") | {
    "/docs": "text/html",
    "/v1/files/{id}/content": "application/octet-stream",
}


T = TypeVar("T")

Document = Mapping[str, Any]
Described = tuple[ServedModel, Document | None]
"""A model, and its engine's own description; None when it has none now."""


def document(
    models: Sequence[Described],
    endpoints: Sequence[Route],
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
        if one.handler == "engine"
        for method in one.methods
    }
    for model, said in models:
        for path, method, operation in _operations(model, said, passed_on.keys(), schemas):
            known = paths.setdefault(path, {}).setdefault(method, operation)
            known["x-models"].append(model.id)
    _name_models(paths, models, schemas, has_default)
    for one in endpoints:
        for method in () if one.handler == "engine" else one.methods:
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
    silent = ", ".join(model.id for model, said in models if said is None)
    text = f"One gateway to {', '.join(model.id for model, _ in models)}."
    more = f" The endpoints of {silent} are left out: no replica that describes them is ready."
    return text + (more if silent else "")


def _operations(
    model: ServedModel, document: Document | None, passed_on: Set[tuple[str, str]], schemas: _Schemas
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Path, method and operation of each endpoint of a model."""
    for path in model.paths:
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
    models: Sequence[Described],
    schemas: _Schemas,
    has_default: bool,
) -> None:
    """Says in the bodies of requests to engines which models there are, and that one must be named."""
    asked: dict[str, dict[str, None]] = {}
    for operation in (one for methods in paths.values() for one in methods.values()):
        for name in _references(operation.get("requestBody")):
            asked.setdefault(name, {}).update(dict.fromkeys(operation["x-models"]))
    for name, ids in asked.items():
        schema = schemas.known.get(name, {})
        if "model" in schema.get("properties", {}):
            may = [model for model, said in models if model.id in ids or said is None]  # of any endpoint
            schema["properties"]["model"] = _model_names(may)
            if not has_default:
                schema["required"] = [*dict.fromkeys([*schema.get("required", ()), "model"])]


def _model_names(models: Sequence[ServedModel]) -> dict[str, Any]:
    names: dict[str, Any] = {"enum": [name for model in models for name in (model.id, *model.aliases)]}
    bases = [re.escape(name) for one in models if one.adapter_slots for name in (one.id, *one.aliases)]
    if bases:
        names = {"anyOf": [names, {"pattern": f"^({'|'.join(bases)}):."}]}
    return {"title": "Model", "type": "string", **names}


class Listed(BaseModel, Generic[T]):
    """A page of a list."""

    object: Literal["list"]
    data: list[T]


def _describe_answers(paths: Mapping[str, Mapping[str, Any]], schemas: _Schemas) -> None:
    """By the types of OpenAI's client, whose import takes a second: engines describe their requests only."""
    from openai.types import Batch, Completion, CreateEmbeddingResponse, FileDeleted, FileObject, Model
    from openai.types.chat import ChatCompletion

    types: dict[tuple[str, str], type[BaseModel]] = {
        ("/v1/chat/completions", "post"): ChatCompletion,
        ("/v1/completions", "post"): Completion,
        ("/v1/embeddings", "post"): CreateEmbeddingResponse,
        ("/v1/models", "get"): Listed[Model],
        ("/v1/models/{id}", "get"): Model,
        ("/v1/files", "get"): Listed[FileObject],
        ("/v1/files", "post"): FileObject,
        ("/v1/files/{id}", "get"): FileObject,
        ("/v1/files/{id}", "delete"): FileDeleted,
        ("/v1/batches", "get"): Listed[Batch],
        ("/v1/batches", "post"): Batch,
        ("/v1/batches/{id}", "get"): Batch,
        ("/v1/batches/{id}/cancel", "post"): Batch,
    }
    found, components = models_json_schema(
        [(one, "serialization") for one in dict.fromkeys(types.values())], ref_template=_REFERENCE + "{model}"
    )
    renamed = schemas.add({"components": {"schemas": components["$defs"]}})
    for (path, method), one in types.items():
        if operation := paths.get(path, {}).get(method):
            content = {"application/json": {"schema": renamed(found[one, "serialization"])}}
            content |= {"text/event-stream": {}} if path in _STREAMED else {}
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


def _own(endpoint: Route, method: str) -> dict[str, Any]:
    kind = _KINDS.get(endpoint.path, "application/json")
    parameters = [
        {"name": name[1:-1], "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    return {
        "summary": _OWN[endpoint.path],
        "tags": ["Service"],
        **({"parameters": parameters} if parameters else {}),
        **({"security": []} if endpoint.public else {}),
        **({"requestBody": _BODIES[endpoint.path]} if method == "POST" and endpoint.path in _BODIES else {}),
        "responses": {"200": {"description": "The answer", "content": {kind: {}}}, "default": _ERROR},
    }


def _administration() -> dict[str, Any]:
    common = {
        "tags": ["Administration"],
        "security": [{"admin_key": []}],
        "responses": {"200": {"description": "What replicas answered"}, "default": _ERROR},
    }
    operated = {f"/admin/{one}": {"post": f"{one} of the fleet"} for one in operations.OPERATIONS}
    return {
        path: {
            method: {"summary": summary, **({} if method == "get" else {"requestBody": _BODY}), **common}
            for method, summary in methods.items()
        }
        for path, methods in (_ADMINISTRATION | operated).items()
    }


_ENVELOPE = msgspec.json.schema_components([Envelope], ref_template=_REFERENCE + "{name}")[1]
_ERROR = {
    "description": "An error; on paths of Anthropic's Messages in their form",
    "content": {"application/json": {"schema": {"$ref": f"{_REFERENCE}Envelope"}}},
}


def _generation(schemas: _Schemas) -> dict[str, Any]:
    (asked, answer), components = msgspec.json.schema_components(
        [generation.GenerateRequest, generation.GenerateResponse], ref_template=_REFERENCE + "{name}"
    )
    schemas.known |= components
    body = {"content": {"application/json": {"schema": asked}}, "required": True}
    answers = {"200": {"description": "The answer", "content": {"application/json": {"schema": answer}}}}
    return _operation({"summary": "Tokens in, tokens out", "requestBody": body, "responses": answers})


@dataclass(slots=True)
class _Schemas:
    """Schemas of all engines. Those of one that differ under the same name get a number."""

    known: dict[str, Any] = field(default_factory=lambda: _ENVELOPE | _BATCH_SCHEMAS)
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
