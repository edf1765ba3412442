"""Schemas of answers, from the types of OpenAI's client, and of requests for files and batches.

Engines describe their requests only.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.jobs.batches import CreateBatch

REFERENCE = "#/components/schemas/"
STREAMED = {"/v1/chat/completions", "/v1/completions"}

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
_BATCH, BATCH_SCHEMAS = msgspec.json.schema_components([CreateBatch], ref_template=REFERENCE + "{name}")
BODIES = {
    "/v1/files": {"content": {"multipart/form-data": {"schema": _FILE}}, "required": True},
    "/v1/batches": {"content": {"application/json": {"schema": _BATCH[0]}}, "required": True},
}
"""Of POST requests that the gateway answers itself."""

T = TypeVar("T")


class Listed(BaseModel, Generic[T]):
    """A page of a list."""

    object: Literal["list"]
    data: list[T]


def answers() -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    """A description that holds the schemas, and a reference to one of them by path and method.

    Imports OpenAI's client, which takes a second.
    """
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
    found, schemas = models_json_schema(
        [(one, "serialization") for one in dict.fromkeys(types.values())], ref_template=REFERENCE + "{model}"
    )
    references = {at: found[one, "serialization"] for at, one in types.items()}
    return {"components": {"schemas": schemas["$defs"]}}, references
