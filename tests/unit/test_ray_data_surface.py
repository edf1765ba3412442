"""Everything that the installed Ray's `ray.data.llm` offers, and what `penstock.data` has for it.

An entry is the same here, an alias (it works, and the reason says how it differs), or refused with a
sentence. A new Ray's new name, argument or default fails a test by that name. Nothing of `ray.data.llm` is
imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic_core import PydanticUndefined
from tests.unit.ray_surface import Entry, surface

import penstock.data
from penstock.data import Processor, vLLMEngineProcessorConfig

pytestmark = pytest.mark.parity("D1", "D15")


@dataclass(frozen=True, slots=True)
class Held:
    """ray: Ray's default of a field, or its arguments. why: how an alias differs; empty for what is the same.

    refused: what a Ray program would do, and what the error says.
    """

    ray: str = ""
    why: str = ""
    refused: tuple[Callable[[], object], str] | None = None


def same(ray: str = "") -> Held:
    return Held(ray)


def alias(ray: str, why: str) -> Held:
    return Held(ray, why)


def refused(ray: str, program: Callable[[], object], says: str) -> Held:
    return Held(ray, refused=(program, says))


ROW_BY_ROW = "accepted with a warning: the engine takes rows one by one, so there is nothing to size"
ON_OR_OFF = "None means on: rows with messages get the template, others do not"
IN_ENGINE = "the engine does it; False and sizes are accepted with a warning"
GOES_ON = "True: a failed row does not end the pipeline; it has `error`, and where True is written out "
GOES_ON += "`__inference_error__` too"

ONE_NODE = "an engine on one node; one on several is refused with how to serve it and name it"

YAML = {
    "parse_yaml": alias("(file, **kwargs)", "always the safe loader; faults are told with their lines"),
    "from_file": alias("(path, **kwargs)", "always the safe loader; faults are told with their lines"),
}
PROCESSOR = YAML | {
    "batch_size": alias("32", "64; rows enter the engine one by one, so it only says how rows travel"),
    "accelerator_type": same("None"),
    "concurrency": alias("1", "n starts n engines at once, (m, n) from m to n of them"),
    "get_concurrency": alias("(autoscaling_enabled=True)", "n is a pool of n, not of 1 to n"),
}
ENGINE = PROCESSOR | {
    "model_source": alias("required", "may be called `model`, too"),
    "runtime_env": same("None"),
    "engine_kwargs": same("dict"),
    "max_pending_requests": same("None"),
    "max_concurrent_batches": alias("8", ROW_BY_ROW),
    "max_tasks_in_flight_per_actor": alias("None", ROW_BY_ROW),
    "should_continue_on_error": alias("False", GOES_ON),
    "chat_template_stage": alias("True", ON_OR_OFF),
    "tokenize_stage": alias("True", IN_ENGINE),
    "detokenize_stage": alias("True", IN_ENGINE),
    "prepare_multimodal_stage": alias("False", "media in messages are read without it"),
}
STAGE = YAML | {
    "enabled": same("True"),
    "batch_size": alias("None", f"{ROW_BY_ROW}; of the HTTP stage it counts"),
    "concurrency": alias("None", f"{ROW_BY_ROW}; of the HTTP stage it counts"),
    "runtime_env": alias("None", f"{ROW_BY_ROW}; of the HTTP stage it counts"),
    "num_cpus": alias("None", f"{ROW_BY_ROW}; of the HTTP stage it counts"),
    "memory": alias("None", f"{ROW_BY_ROW}; of the HTTP stage it counts"),
}
MODEL_STAGE = STAGE | {
    "model_source": alias("None", "the processor's own, or refused: the engine has one tokenizer"),
}

CLASSES: Mapping[str, tuple[Held, Mapping[str, Held]]] = {
    "ProcessorConfig": (same(), PROCESSOR),
    "vLLMEngineProcessorConfig": (
        same(),
        ENGINE
        | {
            "task_type": alias("vLLMTaskType.GENERATE", "by its value, 'generate'"),
            "log_engine_metrics": same("True"),
            "dynamic_lora_loading_path": same("None"),
            "placement_group_config": alias("None", ONE_NODE),
        },
    ),
    "SGLangEngineProcessorConfig": (
        same(),
        ENGINE | {"task_type": alias("SGLangTaskType.GENERATE", "by its value, 'generate'")},
    ),
    "HttpRequestProcessorConfig": (
        same(),
        PROCESSOR
        | {
            "batch_size": same("64"),
            "url": same("required"),
            "headers": same("None"),
            "qps": alias("None", "of all actors together"),
            "max_retries": alias("0", "None: max_attempts counts, by default 3"),
            "base_retry_wait_time_in_s": same("1"),
            "session_factory": alias("None", "one session for each actor, not for each batch"),
            "http_request_stage": alias("True", "None is the same"),
        },
    ),
    "ServeDeploymentProcessorConfig": (
        same(),
        PROCESSOR
        | {
            "deployment_name": alias("required", "may be left out where the application has one"),
            "app_name": same("'default'"),
            "dtype_mapping": same("None"),
            "should_continue_on_error": alias("False", GOES_ON),
            "request_timeout_s": alias("None", "of one try; max_attempts=1 makes it the only one"),
        },
    ),
    "ChatTemplateStageConfig": (
        same(),
        MODEL_STAGE | {"chat_template": same("None"), "chat_template_kwargs": same("None")},
    ),
    "TokenizerStageConfig": (same(), MODEL_STAGE),
    "DetokenizeStageConfig": (same(), MODEL_STAGE),
    "PrepareMultimodalStageConfig": (
        same(),
        STAGE
        | {
            "model_config_kwargs": alias("None", "arguments of the engine"),
            "chat_template_content_format": alias("'string'", "None: found from the template"),
            "apply_sys_msg_formatting": alias("False", "accepted with a warning: the engine does it"),
        },
    ),
    "HttpRequestStageConfig": (same(), STAGE),
    "Processor": (
        refused(
            "(config, stages, preprocess=None, postprocess=None, preprocess_map_kwargs=None, "
            "postprocess_map_kwargs=None)",
            lambda: Processor(vLLMEngineProcessorConfig(model_source="demo"), []),
            r"Use build_processor\(config, preprocess, postprocess\)",
        ),
        {
            "DATA_COLUMN": alias("'__data'", "another name, as reserved"),
            "list_stage_names": alias("()", "one stage: the engine does the work of all"),
            "get_stage_by_name": alias("(name)", "its map_batches_kwargs count when they are changed"),
            "log_input_column_names": same("()"),
        },
    ),
}
TABLE: dict[str, Held] = {
    "build_processor": same(
        "(config, preprocess=None, postprocess=None, preprocess_map_kwargs=None, "
        "postprocess_map_kwargs=None, builder_kwargs=None)"
    ),
    **{name: held for name, (held, _) in CLASSES.items()},
    **{f"{name}.{member}": held for name, (_, held_) in CLASSES.items() for member, held in held_.items()},
}
RAYS = surface("ray.data.llm")


def test_nothing_of_rays_is_unaccounted_for():
    assert sorted(RAYS.keys() - TABLE.keys()) == [], "new in this Ray"
    assert sorted(TABLE.keys() - RAYS.keys()) == [], "gone from this Ray"


@pytest.mark.parametrize("name", TABLE)
def test_rays_arguments_and_defaults_are_those_of_the_table(name: str):
    assert RAYS[name].signature == TABLE[name].ray


def ours(name: str) -> Any:
    found: Any = penstock.data
    for part in name.split("."):
        fields = getattr(found, "model_fields", {})
        found = fields[part] if part in fields else getattr(found, part)
    return found


HERE = [name for name, held in TABLE.items() if not held.refused]


@pytest.mark.parametrize("name", [name for name in HERE if RAYS[name].kind in ("function", "method")])
def test_what_is_called_takes_rays_arguments(name: str):
    own, rays = arguments(ours(name)), arguments(eval(f"lambda {RAYS[name].signature[1:-1]}: None"))
    rays.pop("kwargs", None)  # of the YAML loader; its class is not the program's to choose
    assert list(own.items())[: len(rays)] == list(rays.items())


def arguments(function: Any) -> dict[str, Any]:
    """Defaults by name, in order."""
    found = inspect.signature(function).parameters.values()
    return {argument.name: argument.default for argument in found if argument.name != "self"}


@pytest.mark.parametrize("name", [name for name in HERE if RAYS[name].kind not in ("function", "method")])
def test_what_is_the_same_has_rays_default(name: str):
    found, entry = ours(name), RAYS[name]
    assert found is not None
    if entry.kind == "field" and not TABLE[name].why:
        assert found.get_default(call_default_factory=True) == value(entry)


def value(entry: Entry) -> Any:
    """Ray's default."""
    return PydanticUndefined if entry.signature == "required" else eval(entry.signature, {"dict": {}})


@pytest.mark.parametrize("name", [name for name in CLASSES if name.endswith("Config")])
def test_rays_defaults_may_be_written_out(name: str):
    fields = {
        member.removeprefix(f"{name}."): entry
        for member, entry in RAYS.items()
        if member.startswith(f"{name}.") and entry.kind == "field" and "TaskType" not in entry.signature
    }
    needed = {field for field, entry in fields.items() if entry.signature == "required"}
    usual = {field: value(entry) for field, entry in fields.items() if field not in needed}
    config = getattr(penstock.data, name)(**usual, **dict.fromkeys(needed, "demo"))
    assert {getattr(config, field) for field in needed} <= {"demo"}


@pytest.mark.parametrize("name", [name for name, held in TABLE.items() if held.refused])
def test_what_is_refused_says_what_to_write(name: str):
    assert TABLE[name].refused is not None
    program, says = TABLE[name].refused
    with pytest.raises(ValueError, match=says):
        program()
