"""How a question, a schema and a model's name become what jobs and engines take; and the progress bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from tqdm.auto import tqdm

from penstock.config import LLMConfig, ModelLoadingConfig
from penstock.data.rows.coerce import invalid_field
from penstock.data.rows.input_columns import check_defaults
from penstock.data.rows.parameters import read_parameters
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    Schema = type[BaseModel] | Mapping[str, Any]


def model_config(model: str | os.PathLike[str] | None, engine_kwargs: Mapping[str, Any]) -> LLMConfig:
    """Raises: ConfigError."""
    if not model:
        raise ConfigError("Name a model (a folder or a hub id), or the `url` of a service.")
    if not isinstance(cast("Any", model), str | os.PathLike):
        raise ConfigError(f"The model is {model!r:.80}; name a folder or a hub id.")
    source = os.fspath(model)
    where = ModelLoadingConfig(model_id=Path(source).name, model_source=source)
    return LLMConfig(model_loading_config=where, engine_kwargs=dict(engine_kwargs))


def refuse_engine_arguments(engine_kwargs: Mapping[str, Any]) -> None:
    """Of a call with a `url`. Raises: ConfigError."""
    if engine_kwargs:
        names = ", ".join(engine_kwargs)
        raise ConfigError(f"{names}: of an engine; with `url` the service has its own. Leave it out.")


def with_schema(params: Mapping[str, Any], schema: Schema | None) -> dict[str, Any]:
    """Raises: BadRequest for a name that no request has, or a value that does not fit; ConfigError."""
    check_defaults(params, "generate")
    if (number := read_parameters(params, "generate").get("n") or 1) != 1:
        raise invalid_field("n", f"is {number}; each question has one answer here, so ask it several times")
    if schema is None:
        return dict(params)
    described = {"name": getattr(schema, "__name__", "answer"), "schema": json_schema(schema)}
    return {**params, "response_format": {"type": "json_schema", "json_schema": described}}


def json_schema(schema: Schema) -> Mapping[str, Any]:
    """Raises: ConfigError."""
    if isinstance(schema, Mapping):
        return schema
    if not hasattr(schema, "model_json_schema"):
        raise ConfigError(f"The schema is {schema!r:.80}; give a Pydantic class or a JSON schema as a dict.")
    return schema.model_json_schema()


def bar(rows: int | None, screen: IO[str] | None = None) -> tqdm[Any]:
    """A progress bar on a terminal and in a notebook."""
    shown = (screen or sys.stderr).isatty() or "ipykernel" in sys.modules
    return tqdm(total=rows, unit=" rows", file=screen, leave=False, disable=not shown)
