"""The JSON schema of the files that `penstock serve` takes, for editors: from the fields themselves.

It knows every form that `loading.load` takes, but names of engines in small letters only. What depends on
several fields is for `penstock check`.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from penstock.config.loading.load import SERVE_ONLY_IN_APPLICATION, SERVE_ONLY_IN_FILE, ServeFile
from penstock.config.loading.serving_args import DECODE, MODEL, MODELS, PREFILL, LLMServingArgs
from penstock.config.loading.versions import SHARED
from penstock.config.messages.problems import REFUSED
from penstock.config.schema.model import EngineName

_REF = "#/$defs/"


class _Untitled(GenerateJsonSchema):
    """Names of fields say what they are."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def editor_schema() -> dict[str, Any]:
    """JSON Schema, draft 7, of one model, of a builder's arguments, and of Ray Serve's file."""
    _, found = models_json_schema(
        [(LLMServingArgs, "validation"), (ServeFile, "validation")],
        ref_template=f"{_REF}{{model}}",
        schema_generator=_Untitled,
    )
    kinds: dict[str, Any] = found["$defs"]
    for kind in kinds.values():
        for name, field in kind["properties"].items():
            if field.get("description", "").startswith(REFUSED):
                kind["properties"][name] = {"const": field["default"], "description": field["description"]}
    arguments, model = kinds["LLMServingArgs"], kinds["LLMConfig"]
    one = {"anyOf": [{"type": "string"}, {"$ref": f"{_REF}LLMConfig"}]}
    arguments["properties"] |= dict.fromkeys((MODEL, PREFILL, DECODE), one)
    model["properties"]["llm_engine"]["enum"] = list(get_args(EngineName))
    del arguments["required"]
    arguments["anyOf"] = [{"required": names} for names in ([MODELS], [MODEL], [PREFILL, DECODE])]
    loading = kinds["ModelLoadingConfig"]
    kinds["ModelLoadingConfigOfVersion"] = {
        **loading,
        "properties": {name: kind for name, kind in loading["properties"].items() if name != "model_id"},
        "required": [],
    }
    kinds["VersionEntry"] |= {"additionalProperties": False}
    kinds["VersionEntry"]["properties"] |= {
        **{name: field for name, field in model["properties"].items() if name not in SHARED},
        "model_loading_config": {"$ref": f"{_REF}ModelLoadingConfigOfVersion"},
    }
    kinds["ServeApplication"]["properties"] |= {
        "args": {"$ref": f"{_REF}LLMServingArgs"},
        **{name: {} for name in sorted(SERVE_ONLY_IN_APPLICATION)},
    }
    kinds["ServeFile"]["properties"] |= {name: {} for name in sorted(SERVE_ONLY_IN_FILE)}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A file of `penstock serve`",
        "anyOf": [{"$ref": f"{_REF}{name}"} for name in ("LLMServingArgs", "LLMConfig", "ServeFile")],
        "$defs": kinds,
    }
