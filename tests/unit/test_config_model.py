"""LLMConfig: names that users know, faults told at once, secrets unseen."""

import pickle
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import penstock.config
from penstock.config import GatewayConfig, LLMConfig, LoraConfig, ModelLoadingConfig
from penstock.config.derive.server_class import server_class
from penstock.config.fleet.document import document
from penstock.config.messages.problems import warn_once
from penstock.config.messages.redact import masked
from penstock.config.schema.strict import StrictModel
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("S2")


def config(**values):
    return LLMConfig(**{"model_loading_config": {"model_id": "m"}, **values})


def problems(**values) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config(**values)
    return caught.value.problems


def test_the_founding_examples_config_is_accepted():
    accepted = LLMConfig(
        model_loading_config={"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
        deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
        accelerator_type="A10G",
        engine_kwargs={"tensor_parallel_size": 2},
        runtime_env={"env_vars": {"HF_TOKEN": "hf_1"}},
        lora_config={"dynamic_lora_loading_path": "s3://adapters", "max_num_adapters_per_replica": 16},
    )
    assert accepted.model_id == "qwen-0.5b"
    assert accepted.model_source == "Qwen/Qwen2.5-0.5B-Instruct"
    assert accepted.deployment_config == {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}


def parts(part: type[StrictModel] = StrictModel) -> Iterator[type[StrictModel]]:
    """Every piece of configuration that there is."""
    for kind in part.__subclasses__():
        yield kind
        yield from parts(kind)


def test_every_part_refuses_keys_that_it_does_not_know():
    for module in pkgutil.walk_packages(penstock.config.__path__, "penstock.config."):
        import_module(module.name)
    ours = [part for part in parts() if part.__module__.startswith("penstock.config.")]
    lenient = {part.__name__ for part in ours if part.model_config.get("extra") != "forbid"}
    # They read some of what other parts check: the engine its arguments, the version's config its fields.
    assert lenient == {"EngineSizes", "VersionEntry"}


@pytest.mark.parametrize(
    ("part", "written"),
    [
        ("lora_config", {"pined": ["a"]}),
        ("placement_group_config", {"bundle_per_worker": {"GPU": 1}, "strategi": "PACK"}),
        ("accelerator_config", {"kindd": "cpu"}),
        ("callback_config", {"callback_clas": "a:B"}),
        ("on_demand", {"awak": 1}),
        ("prefill", {"min_prompt_token": 1}),
    ],
)
def test_an_unknown_key_of_a_part_is_told_with_the_nearest_one(part: str, written: dict):
    assert any("did you mean" in text for text in problems(**{part: written}))


def test_the_model_id_is_the_source_where_none_is_given():
    assert config().model_source == "m"


@pytest.mark.parametrize("model_id", ["", " ", "\n"])
def test_a_model_needs_a_name_that_can_be_seen(model_id: str):
    (problem,) = problems(model_loading_config={"model_id": model_id})
    assert "model_loading_config.model_id" in problem


def test_demo_is_the_folder_of_the_embedded_model():
    values = {"model_id": "anything", "model_source": "demo"}
    assert config(model_loading_config=values).model_source == str(penstock.demo_model())


def test_the_embedded_models_id_needs_no_source():
    assert config(model_loading_config={"model_id": "penstock-demo"}).model_source == str(
        penstock.demo_model()
    )


def test_parts_may_be_given_as_objects():
    given = config(model_loading_config=ModelLoadingConfig(model_id="a"), lora_config=LoraConfig())
    assert given.model_id == "a"


def test_a_bucket_uri_is_the_source():
    values = {"model_id": "m", "model_source": {"bucket_uri": "s3://models/m"}}
    assert config(model_loading_config=values).model_source == "s3://models/m"


@pytest.mark.parametrize(("written", "name"), [("vLLM", "vllm"), ("VLLM", "vllm"), ("Sim", "sim")])
def test_case_of_the_engine_does_not_matter(written, name):
    assert config(llm_engine=written).engine_name == name


def test_an_unknown_engine_names_the_nearest_and_the_known_ones():
    (told,) = problems(llm_engine="vlm")
    assert told.startswith("llm_engine: ")
    assert all(name in told for name in ("'vllm'", "process, sglang, sim, vllm"))


def test_all_faults_are_told_at_once_each_with_its_path():
    told = problems(
        model_loading_config={"model_idd": "m"},
        accelerator_config={"kind": "gpuu"},
        deployment_config={"num_replica": 2, "ray_actor_options": {"num_cpus": -1}},
    )
    assert [text.partition(": ")[0] for text in told] == [
        "model_loading_config.model_id",
        "model_loading_config.model_idd",
        "accelerator_config.kind",
        "deployment_config.ray_actor_options.num_cpus",
        "deployment_config.num_replica",
    ]


def test_the_error_text_has_one_line_per_fault():
    with pytest.raises(ConfigError) as caught:
        config(llm_engin="x", engine_kwarg={})
    assert str(caught.value).splitlines() == ["2 problems:", *caught.value.problems]


def test_an_unknown_key_names_the_nearest_and_all_known():
    (told,) = problems(engine_kwarg={})
    assert "did you mean 'engine_kwargs'?" in told
    assert "model_loading_config" in told


def test_a_number_where_text_belongs_says_to_quote_it():
    (told,) = problems(model_loading_config={"model_id": 7})
    assert told == "model_loading_config.model_id: is the number 7; must be text. Write it in quotes."


def test_a_value_out_of_its_limits_names_them():
    (told,) = problems(deployment_config={"num_replicas": 0})
    assert told == "deployment_config.num_replicas: is 0; must be at least 1."


def test_a_wrong_choice_names_the_allowed_and_the_nearest():
    (told,) = problems(accelerator_config={"kind": "gpuu"})
    assert told.startswith("accelerator_config.kind: 'gpuu' is not allowed; must be ")
    assert told.endswith("Did you mean 'gpu'?")


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"engine_start_timeout_s": "60"}, "engine_start_timeout_s"),
        ({"log_engine_metrics": "yes"}, "log_engine_metrics"),
        (
            {"experimental_configs": {"stream_batching_interval": 50}},
            "experimental_configs.stream_batching_interval",
        ),
    ],
)
def test_other_wrong_types_and_unknown_names_are_refused_by_their_path(values, path):
    (told,) = problems(**values)
    assert told.startswith(f"{path}: ")


def test_streams_are_not_batched_by_default():
    assert config().stream_batching_interval_ms == 0


def test_the_stream_batching_interval_is_read():
    assert config(experimental_configs={"stream_batching_interval_ms": 50}).stream_batching_interval_ms == 50


def test_placement_needs_one_of_its_two_forms():
    (told,) = problems(placement_group_config={"strategy": "PACK"})
    assert told.startswith("placement_group_config: ")


@pytest.mark.parametrize("size", [0, -1, "2", 1.5, True])
def test_a_parallel_size_is_a_whole_number_from_one(size):
    (told,) = problems(engine_kwargs={"tensor_parallel_size": size})
    assert told.startswith("engine_kwargs.tensor_parallel_size: is ")


def test_other_engine_arguments_are_the_engines_to_check():
    assert config(engine_kwargs={"anything": object}).engine_kwargs == {"anything": object}


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        config().llm_engine = "sim"


def test_a_config_survives_pickling():
    before = config(runtime_env={"env_vars": {"A": "b"}}, engine_kwargs={"max_model_len": 5})
    assert pickle.loads(pickle.dumps(before)) == before


def test_secrets_are_masked_in_repr_and_str():
    hidden = config(
        runtime_env={"env_vars": {"HF_TOKEN": "hf_1", "AWS_SECRET_ACCESS_KEY": "aws_1", "HF_HOME": "/cache"}},
        engine_kwargs={"hf_token": "hf_2", "max_num_batched_tokens": 77},
        deployment_config={"ray_actor_options": {"runtime_env": {"env_vars": {"MY_PASSWORD": "pw_1"}}}},
    )
    for text in (repr(hidden), str(hidden)):
        assert not any(secret in text for secret in ("hf_1", "hf_2", "aws_1", "pw_1"))
        assert "/cache" in text
        assert "77" in text


def test_faults_in_environment_variables_do_not_show_them():
    (told,) = problems(runtime_env={"env_vars": {"HF_HUB_OFFLINE": 1234}})
    assert told.startswith("runtime_env.env_vars.HF_HUB_OFFLINE: ")
    assert "1234" not in told


def test_a_server_class_is_imported_by_its_path():
    assert server_class(config(server_cls="penstock.config:GatewayConfig"), object) is GatewayConfig


def test_a_server_class_is_taken_as_it_is():
    assert server_class(config(server_cls=GatewayConfig), object) is GatewayConfig


def test_without_a_server_class_the_default_serves():
    assert server_class(config(), GatewayConfig) is GatewayConfig


def test_a_server_class_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"server_cls: 'penstock\.config:Nobody'"):
        server_class(config(server_cls="penstock.config:Nobody"), object)


def test_a_server_class_that_is_no_class_is_refused():
    with pytest.raises(ConfigError, match="server_cls: "):
        server_class(config(server_cls="penstock.config:load_configs"), object)


def test_a_fault_is_a_value_error_too():
    with pytest.raises(ValueError, match="llm_engine"):
        config(llm_engine="x")


@pytest.mark.parity("S6")
def test_a_variable_takes_its_value_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_HUB_TOKEN", "hf_1")
    read = config(runtime_env={"env_vars": {"HF_TOKEN": "${MY_HUB_TOKEN}", "PATTERN": "a${b}", "A": "b"}})
    assert read.runtime_env == {"env_vars": {"HF_TOKEN": "hf_1", "PATTERN": "a${b}", "A": "b"}}
    assert "hf_1" not in repr(read)


@pytest.mark.parity("S6")
@pytest.mark.parametrize(
    "path",
    [
        "deployment_config.ray_actor_options",
        "prefill",
        "prefill.deployment_config.ray_actor_options",
        "preprocessor_options.ray_actor_options",
    ],
)
def test_every_environment_of_a_model_takes_variables(monkeypatch: pytest.MonkeyPatch, path: str):
    def at(names: list[str], value: Any) -> Any:
        return {names[0]: at(names[1:], value)} if names else value

    names = [*path.split("."), "runtime_env"]
    given = at(names, {"env_vars": {"HF_TOKEN": "${MY_HUB_TOKEN}"}})
    fields = {"llm_engine": "vllm", "preprocessor": "a:b"} if "pre" in path else {}
    monkeypatch.delenv("MY_HUB_TOKEN", raising=False)
    (told,) = problems(**fields, **given)
    assert "${MY_HUB_TOKEN}" in told
    monkeypatch.setenv("MY_HUB_TOKEN", "hf_1")
    found: Any = document(config(**fields, **given))
    for name in names:
        found = found[name]
    assert found == {"env_vars": {"HF_TOKEN": "hf_1"}}


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MY_HUB_TOKEN", raising=False)
    (told,) = problems(runtime_env={"env_vars": {"HF_TOKEN": "${MY_HUB_TOKEN}"}})
    assert "${MY_HUB_TOKEN}" in told


@pytest.mark.parity("S6")
def test_the_signature_of_a_url_is_masked():
    source = "https://files.example/m?se=2026&X-Amz-Signature=pw_1&sig=pw_2"
    read = config(lora_config={"adapters": {"a": source}})
    assert "pw_" not in repr(read)
    assert "files.example/m?se=2026" in repr(read)


def test_the_file_of_a_certificates_key_is_shown():
    tls = {"cert": "a.pem", "key": "b.pem"}
    assert masked({"tls": tls, "key": "abc"}) == {"tls": tls, "key": "*" * 10}


@pytest.mark.parity("S6")
def test_of_variables_only_what_is_surely_public_is_shown():
    hidden = {
        "PGPASS": "a",
        "MY_PW": "b",
        "GH_PAT": "c",
        "SLACK_WEBHOOK": "https://hooks.example/T/B",
        "X": "ab",
    }
    shown = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "WORKERS": "8",
        "DEBUG": "true",
        "S3_ENDPOINT": "https://minio:9000",
    }
    found = masked({"env_vars": {**hidden, **shown}})["env_vars"]
    assert found == {**dict.fromkeys(hidden, "*" * 10), **shown}


@pytest.mark.parity("S6")
def test_a_login_in_a_url_is_masked():
    read = config(runtime_env={"env_vars": {"HTTPS_PROXY": "http://me:pw_1@proxy:8080"}})
    assert "pw_1" not in repr(read)
    assert "proxy:8080" in repr(read)


@pytest.mark.parametrize(
    ("task", "given", "arguments"),
    [
        ("embed", {}, {"runner": "pooling", "convert": "embed"}),
        ("embedding", {"convert": "none"}, {"runner": "pooling", "convert": "none"}),
        ("classify", {}, {"runner": "pooling", "convert": "classify"}),
        ("score", {}, {"runner": "pooling"}),
        ("reward", {}, {"runner": "pooling"}),
        ("generate", {}, {"runner": "generate"}),
        ("auto", {}, {}),
        ("embbed", {}, {"task": "embbed"}),  # vLLM's own check refuses it
    ],
)
def test_the_task_of_older_vllms_becomes_the_arguments_in_its_place(task, given, arguments, caplog):
    warn_once.cache_clear()
    config = LLMConfig(model_loading_config={"model_id": "m"}, engine_kwargs={"task": task, **given})
    assert config.engine_kwargs == arguments
    assert ("vLLM has no `task` any more" in caplog.text) == (task != "embbed")
    updated = LLMConfig(model_loading_config={"model_id": "m"}, engine_kwargs=dict(given))
    updated.update_engine_kwargs(task=task)
    assert updated.engine_kwargs == arguments


def test_the_task_of_another_engine_is_its_own():
    config = LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs={"task": "embed"}
    )
    assert config.engine_kwargs == {"task": "embed"}
