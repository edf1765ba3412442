"""Configs of processors: what is wrong with one is said where it is written."""

from typing import Any

import pydantic
import pytest

from penstock.config.messages.notices import warn_once
from penstock.data import (
    HttpRequestProcessorConfig,
    ServeDeploymentProcessorConfig,
    build_processor,
    vLLMEngineProcessorConfig,
)
from penstock.data.pipeline.configs import llm_config
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.engines.vllm.arguments import lora
from penstock.errors import BadRequest, ConfigError


@pytest.mark.parity("D15")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model_source": "demo", "batchsize": 3}, "batch_size"),
        ({"model_source": "demo", "concurrency": 0}, "concurrency"),
        ({"model_source": "demo", "concurrency": (3, 2)}, "concurrency"),
        ({}, "model_source"),
        ({"model": "demo", "model_source": "demo"}, "one model"),
        ({"model": "demo", "task_type": "sing"}, "generate"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(wrong, says):
    with pytest.raises(ValueError, match=says):
        vLLMEngineProcessorConfig(**wrong)


class RaysStage(pydantic.BaseModel):
    """What Ray's ChatTemplateStageConfig is, in Ray 2.60: a pydantic model of these fields."""

    enabled: bool = True
    batch_size: int | None = None
    concurrency: int | tuple[int, int] | None = None
    runtime_env: dict[str, Any] | None = None
    num_cpus: float | None = None
    memory: float | None = None
    model_source: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@pytest.mark.parametrize(
    "stage",
    [
        {"chat_template": "FIXED {{ messages }}", "chat_template_kwargs": {"thinking": False}},
        RaysStage(
            chat_template="FIXED {{ messages }}", chat_template_kwargs={"thinking": False}, batch_size=8
        ),
    ],
)
def test_a_chat_template_of_rays_stage_is_the_engines(stage):
    config = vLLMEngineProcessorConfig(model_source="demo", chat_template_stage=stage)
    assert llm_config(config).engine_kwargs == {
        "chat_template": "FIXED {{ messages }}",
        "default_chat_template_kwargs": {"thinking": False},
    }


def test_the_format_of_contents_of_rays_stage_is_the_engines():
    stage = {"enabled": True, "chat_template_content_format": "openai"}
    config = vLLMEngineProcessorConfig(model_source="demo", prepare_multimodal_stage=stage)
    assert llm_config(config).engine_kwargs == {"chat_template_content_format": "openai"}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"chat_template_stage": {"enabled": "maybe"}}, "chat_template_stage.enabled"),
        ({"chat_template_stage": {"chat_templat": "x"}}, "did you mean 'chat_template'"),
        ({"tokenize_stage": {"model_source": "another"}}, "tokenizer_source"),
        ({"tokenize_stage": 3}, "tokenize_stage"),
        ({"has_image": "yes"}, "has_image"),
        (
            {"chat_template_stage": {"chat_template": "a"}, "engine_kwargs": {"chat_template": "b"}},
            "in engine_kwargs and in a stage",
        ),
    ],
)
def test_a_stage_that_says_what_cannot_be_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        vLLMEngineProcessorConfig(model_source="demo", **wrong)


@pytest.mark.parametrize(
    ("idle", "named"),
    [
        ({"max_concurrent_batches": 4}, "max_concurrent_batches"),
        (
            {"tokenize_stage": {"batch_size": 8, "num_cpus": 2}},
            "tokenize_stage.batch_size, tokenize_stage.num_cpus",
        ),
        ({"detokenize": False}, "detokenize"),
        ({"prepare_image_stage": False}, "prepare_image_stage.enabled"),
    ],
)
def test_what_ray_knows_and_has_no_effect_here_is_a_warning_said_once(idle, named, caplog):
    warn_once.cache_clear()
    for _ in range(2):
        vLLMEngineProcessorConfig(model_source="demo", **idle)
    assert caplog.text.count(f"{named}: without effect") == 1


def test_what_rays_programs_usually_say_is_no_warning(caplog):
    usual = {"apply_chat_template": True, "tokenize": True, "detokenize": True, "has_image": True}
    vLLMEngineProcessorConfig(model_source="demo", chat_template_stage=True, tokenize_stage={}, **usual)
    assert caplog.text == ""


@pytest.mark.parametrize("off", [{"chat_template_stage": {"enabled": False}}, {"apply_chat_template": False}])
def test_a_prompt_wins_over_the_messages_it_was_made_of_where_the_user_applies_the_template(off, caplog):
    row = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "<user>Hi"}
    ask = stage_spec(vLLMEngineProcessorConfig(model_source="demo", **off)).build_request
    assert ask(row, {}).body.startswith(b'{"prompt":"<user>Hi"')
    with pytest.raises(BadRequest, match="messages is given beside prompt"):
        stage_spec(vLLMEngineProcessorConfig(model_source="demo")).build_request(row, {})
    assert caplog.text == ""


@pytest.mark.parametrize(
    "config",
    [
        vLLMEngineProcessorConfig(model_source="demo", read_files=False),
        ServeDeploymentProcessorConfig(read_files=False),
        HttpRequestProcessorConfig(url="http://host", read_files=False),
    ],
)
def test_rows_of_strangers_have_no_file_read(config):
    picture = {"type": "image_url", "image_url": {"url": "/etc/hostname"}}
    row = {"messages": [{"role": "user", "content": [picture]}]}
    with pytest.raises(BadRequest, match="files are not read here"):
        stage_spec(config).build_request(row, {})


def test_max_loras_of_rays_programs_are_the_adapters_of_one_engine():
    kwargs = {"enable_lora": True, "max_loras": 1}
    config = vLLMEngineProcessorConfig(
        model_source="demo", engine_kwargs=kwargs, dynamic_lora_loading_path="/adapters"
    )
    model = llm_config(config)
    assert model.lora_config.max_num_adapters_per_replica == 1
    assert model.engine_kwargs == {"enable_lora": True}
    assert lora.faults(model) == []


def test_no_credential_of_a_service_is_shown():
    headers = {"Authorization": "Bearer hidden", "Cookie": "hidden", "X-Team": "blue"}
    shown = repr(HttpRequestProcessorConfig(url="http://host", api_key="hidden", headers=headers))
    assert "hidden" not in shown
    assert "blue" in shown


@pytest.mark.parametrize("step", ["preprocess", "postprocess"])
def test_options_that_a_step_sets_itself_are_refused(step):
    options = {f"{step}_map_kwargs": {"batch_format": "pandas", "num_cpus": 1}}
    with pytest.raises(ConfigError, match=f"{step}_map_kwargs: batch_format cannot be set"):
        build_processor(vLLMEngineProcessorConfig(model_source="demo"), **options)
