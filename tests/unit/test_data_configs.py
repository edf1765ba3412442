"""Configs of processors: what is wrong with one is said where it is written."""

from typing import Any

import msgspec
import pydantic
import pytest

from penstock.config.messages.problems import warn_once
from penstock.data import (
    ChatTemplateStageConfig,
    EngineProcessorConfig,
    HttpRequestProcessorConfig,
    HttpRequestStageConfig,
    LLMConfig,
    PrepareMultimodalStageConfig,
    ServeDeploymentProcessorConfig,
    SGLangEngineProcessorConfig,
    build_processor,
    vLLMEngineProcessorConfig,
)
from penstock.data.pipeline.model_configs import llm_config
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.engines.vllm.arguments.defaults import lora_faults
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


MODEL = {"model_loading_config": {"model_id": "m"}}


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
        ({"prepare_multimodal_stage": {"apply_sys_msg_formatting": True}}, "apply_sys_msg_formatting"),
    ],
)
def test_what_ray_knows_and_has_no_effect_here_is_a_warning_said_once(idle, named, caplog):
    warn_once.cache_clear()
    for _ in range(2):
        vLLMEngineProcessorConfig(model_source="demo", **idle)
    assert caplog.text.count(f"{named}: without effect") == 1


def test_what_rays_programs_usually_say_is_no_warning(caplog):
    older = {"apply_chat_template": True, "tokenize": True, "detokenize": False, "has_image": True}
    stages = {"chat_template_stage": True, "tokenize_stage": {}, "detokenize_stage": False}
    vLLMEngineProcessorConfig(model_source="demo", **older, **stages)
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
    assert lora_faults(model) == []


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


def test_variables_of_the_template_come_from_the_builder_where_the_stage_has_none():
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    stage = ChatTemplateStageConfig(chat_template="{{ messages }}")
    config = vLLMEngineProcessorConfig(model_source="demo", chat_template_stage=stage)
    assert llm_config(build_processor(config, builder_kwargs=kwargs).config).engine_kwargs == {
        "chat_template": "{{ messages }}",
        "default_chat_template_kwargs": {"enable_thinking": True},
    }
    own = vLLMEngineProcessorConfig(
        model_source="demo", chat_template_stage={"chat_template_kwargs": {"enable_thinking": False}}
    )
    given = llm_config(build_processor(own, builder_kwargs=kwargs).config).engine_kwargs
    assert given == {"default_chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize(
    ("config", "kwargs", "says"),
    [
        (vLLMEngineProcessorConfig(model_source="demo"), {"preprocess": None}, "preprocess is not known"),
        (
            HttpRequestProcessorConfig(url="http://host"),
            {"chat_template_kwargs": {}},
            "without effect with Http",
        ),
    ],
)
def test_what_a_builder_does_not_take_is_refused(config, kwargs, says):
    with pytest.raises(ConfigError, match=says):
        build_processor(config, builder_kwargs=kwargs)


@pytest.mark.parity("D5")
def test_sglangs_engine_gets_its_own_arguments_and_each_row_the_templates_variables():
    stage = ChatTemplateStageConfig(chat_template="/a.jinja", chat_template_kwargs={"thinking": False})
    config = SGLangEngineProcessorConfig(
        model_source="demo", engine_kwargs={"tp_size": 2}, chat_template_stage=stage
    )
    model = llm_config(config)
    assert (model.engine_name, model.engine_kwargs) == (
        "sglang",
        {"tp_size": 2, "chat_template": "/a.jinja"},
    )
    ask = stage_spec(config).build_request
    body = msgspec.json.decode(ask({"messages": [{"role": "user", "content": "x"}]}, {}).body)
    assert body["chat_template_kwargs"] == {"thinking": False}
    assert "chat_template_kwargs" not in msgspec.json.decode(ask({"prompt": "x"}, {}).body)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"task_type": "embed"}, "only generates"),
        ({"chat_template_stage": {"chat_template": "{{ messages }}"}}, "give its path"),
        ({"prepare_multimodal_stage": {"chat_template_content_format": "openai"}}, "engine_kwargs"),
        ({"dynamic_lora_loading_path": "/adapters"}, "dynamic_lora_loading_path"),
    ],
)
def test_what_sglang_does_not_do_is_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        SGLangEngineProcessorConfig(model_source="demo", **wrong)


def test_arguments_of_a_media_stages_model_are_the_engines():
    stage = PrepareMultimodalStageConfig(model_config_kwargs={"allowed_local_media_path": "/tmp"})
    config = vLLMEngineProcessorConfig(model_source="demo", prepare_multimodal_stage=stage)
    assert llm_config(config).engine_kwargs == {"allowed_local_media_path": "/tmp"}
    assert config.prepare_multimodal_stage.get("enabled") is True


def test_a_stage_made_by_itself_names_its_misspelt_option():
    with pytest.raises(ConfigError, match="did you mean 'chat_template'"):
        ChatTemplateStageConfig(chat_templat="x")


def test_actors_that_send_requests_are_as_their_stage_says():
    config = HttpRequestProcessorConfig(
        url="http://host",
        accelerator_type="L4",
        concurrency=1,
        http_request_stage=HttpRequestStageConfig(concurrency=(2, 3), batch_size=7, num_cpus=2, memory=5),
    )
    assert stage_spec(config).resources() == {"num_cpus": 2, "memory": 5, "accelerator_type": "L4"}
    assert (config.get_concurrency(), config.rows_per_batch) == ({"min_size": 2, "max_size": 3}, 7)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: HttpRequestProcessorConfig(url="http://host", http_request_stage=False), "enabled is False"),
        (lambda: HttpRequestProcessorConfig(url="http://host", http_request_stage={"size": 1}), "size"),
        (lambda: EngineProcessorConfig(llm_config=LLMConfig(**MODEL), accelerator_type="L4"), "llm_config"),
    ],
)
def test_what_a_client_or_an_engine_cannot_be_is_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        config()


def test_a_pool_of_n_is_n_in_rays_words():
    config = vLLMEngineProcessorConfig(model_source="demo", concurrency=4)
    assert config.get_concurrency() == {"min_size": 4, "max_size": 4}
    assert config.get_concurrency(autoscaling_enabled=False) == {"size": 4}
