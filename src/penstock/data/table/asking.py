"""How a question, a schema and a model's name become what jobs and engines take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import LLMConfig, ModelLoadingConfig
from penstock.data.rows.input_columns import check_defaults
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Schema = type[BaseModel] | Mapping[str, Any]


def model_config(model: str | None, engine_kwargs: Mapping[str, Any]) -> LLMConfig:
    if model is None:
        raise ConfigError("Name a model (a folder or a hub id), or the `url` of a service.")
    where = ModelLoadingConfig(model_id=Path(model).name, model_source=model)
    return LLMConfig(model_loading_config=where, engine_kwargs=dict(engine_kwargs))


def with_schema(params: Mapping[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Raises: BadRequest for a name that no request has, or a value that does not fit."""
    check_defaults(params, "generate")
    if schema is None:
        return dict(params)
    described = {"name": getattr(schema, "__name__", "answer"), "schema": json_schema(schema)}
    return {**params, "response_format": {"type": "json_schema", "json_schema": described}}


def json_schema(schema: Schema) -> Mapping[str, Any]:
    return schema.model_json_schema() if isinstance(schema, type) else schema
