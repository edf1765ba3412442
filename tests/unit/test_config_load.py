"""YAML in three forms, and what is said of files with faults."""

import json
from pathlib import Path

import pytest

from penstock.cli.models.faults import quick_faults
from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.config import LLMConfig, LLMServingArgs, load_applications, load_configs
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("S1")

ONE = "model_loading_config:\n  model_id: a\n"
BUILT = "import_path: penstock.serve:build_openai_app"


def write(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(file)


def fault(given) -> str:
    with pytest.raises(ConfigError) as caught:
        load_configs(given)
    return str(caught.value)


def ids(given) -> list[str]:
    return [config.model_id for config in load_configs(given)]


def test_a_file_of_one_model(tmp_path):
    assert ids(write(tmp_path, "a.yaml", ONE)) == ["a"]


def test_a_path_object(tmp_path):
    assert ids(Path(write(tmp_path, "a.yaml", ONE))) == ["a"]


def test_a_mapping():
    assert ids({"model_loading_config": {"model_id": "a"}}) == ["a"]


def test_a_config_itself():
    assert ids(LLMConfig(model_loading_config={"model_id": "a"})) == ["a"]


def test_a_list_of_several_kinds(tmp_path):
    given = [write(tmp_path, "a.yaml", ONE), {"model_loading_config": {"model_id": "b"}}]
    assert ids(given) == ["a", "b"]


def test_the_inline_applications_form(tmp_path):
    text = """
applications:
- args:
    llm_configs:
        - model_loading_config:
            model_id: qwen-0.5b
            model_source: Qwen/Qwen2.5-0.5B-Instruct
          accelerator_type: A10G
          deployment_config:
            autoscaling_config:
                min_replicas: 1
                max_replicas: 2
        - model_loading_config: {model_id: qwen-1.5b}
  import_path: penstock.serve.builders:build_openai_app
  name: llm_app
  route_prefix: "/"
"""
    (application,) = load_applications(write(tmp_path, "config.yaml", text))
    assert application.name == "llm_app"
    assert [config.model_id for config in application.args.llm_configs] == ["qwen-0.5b", "qwen-1.5b"]


def test_paths_count_from_the_files_own_folder(tmp_path):
    write(tmp_path, "models/a.yaml", ONE)
    text = f"applications:\n- {BUILT}\n  args:\n    llm_configs: [models/a.yaml]\n"
    assert ids(write(tmp_path, "config.yaml", text)) == ["a"]


def test_paths_count_from_the_working_directory_next(tmp_path, monkeypatch):
    write(tmp_path, "here/models/a.yaml", ONE)
    monkeypatch.chdir(tmp_path / "here")
    assert ids(write(tmp_path, "there/config.yaml", "llm_configs: [models/a.yaml]\n")) == ["a"]


SOURCES = """
model_loading_config: {model_id: m, model_source: ./weights, tokenizer_source: org/hub-id}
lora_config: {dynamic_lora_loading_path: ../loras, adapters: {one: ./one, two: s3://bucket/two}}
"""


@pytest.mark.parametrize("form", ["alone", "in a list"])
def test_sources_count_from_the_folder_of_the_file_that_names_them(tmp_path, form):
    file = write(tmp_path, "site/models/m.yaml", SOURCES)
    if form == "in a list":
        file = write(tmp_path, "site/config.yaml", "llm_configs: [models/m.yaml]\n")
    (config,) = load_configs(file)
    here = tmp_path / "site" / "models"
    assert (config.model_source, config.model_loading_config.tokenizer_source) == (
        str(here / "weights"),
        "org/hub-id",
    )
    assert config.lora_config.dynamic_lora_loading_path == str(tmp_path / "site" / "loras")
    assert config.lora_config.adapters == {"one": str(here / "one"), "two": "s3://bucket/two"}


def test_a_source_that_is_only_in_the_working_directory_is_found_there(tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    (config,) = load_configs(write(tmp_path, "site/m.yaml", SOURCES))
    assert config.model_source == "./weights"


def test_json_is_yaml_with_its_escapes(tmp_path):
    """As Python's `json.dumps` writes an emoji: in two escapes."""
    model = {"model_loading_config": {"model_id": "a"}, "engine_kwargs": {"\U0001f600": "\u00e4\U0001f600"}}
    (config,) = load_configs(write(tmp_path, "a.yaml", json.dumps(model)))
    assert config.engine_kwargs == model["engine_kwargs"]
    half = write(tmp_path, "b.yaml", 'model_loading_config: {model_id: a, model_source: "x\\ud83d"}')
    assert f"{half}:1:51: is not valid YAML: it has half of a character: an escape" in fault(half)


def test_a_source_in_a_program_stays_as_it_is():
    assert LLMConfig(model_loading_config={"model_id": "./weights"}).model_source == "./weights"


def test_several_applications_keep_their_own_models(tmp_path):
    text = f"""
applications:
- {{name: one, {BUILT}, args: {{llm_configs: [{{model_loading_config: {{model_id: a}}}}]}}}}
- {{name: two, {BUILT}, args: {{llm_configs: [{{model_loading_config: {{model_id: b}}}}]}}}}
"""
    found = load_applications(write(tmp_path, "config.yaml", text))
    assert [(one.name, one.args.llm_configs[0].model_id) for one in found] == [("one", "a"), ("two", "b")]


def test_the_gateway_is_read_beside_the_models(tmp_path):
    text = "llm_configs: [{model_loading_config: {model_id: a}}]\ngateway: {default_model: a}\n"
    (application,) = load_applications(write(tmp_path, "config.yaml", text))
    assert application.args.gateway.default_model == "a"


def test_a_fault_names_file_line_and_path(tmp_path):
    text = """\
applications:
- import_path: penstock.serve:build_openai_app
  args:
    llm_configs:
    - model_loading_config: {model_id: a}
    - model_loading_config: {model_id: b}
      llm_engin: sim
"""
    file = write(tmp_path, "config.yaml", text)
    assert fault(file).startswith(f"{file}:7: applications[0].args.llm_configs[1].llm_engin: unknown key")


def test_a_fault_in_a_models_file_names_that_file(tmp_path):
    model = write(tmp_path, "models/a.yaml", ONE + "engine_kwarg: {}\n")
    told = fault(write(tmp_path, "config.yaml", "llm_configs: [models/a.yaml]\n"))
    assert told.startswith(f"{model}:3: engine_kwarg: unknown key")


def test_faults_of_all_files_and_of_the_envelope_are_told_at_once(tmp_path):
    write(tmp_path, "a.yaml", ONE + "foo: 1\n")
    text = """
applications:
- import_pat: x:y
  args:
    llm_configs: [a.yaml, {model_loading_config: {}}, 5, missing.yaml]
    gatway: {}
"""
    with pytest.raises(ConfigError) as caught:
        load_configs(write(tmp_path, "config.yaml", text))
    told = "\n".join(caught.value.problems)
    for expected in (
        "import_pat: ",
        "import_path: is missing",
        "a.yaml:3: foo",
        "llm_configs[1].model_loading_config",
    ):
        assert expected in told
    for expected in ("llm_configs[2]: is the number 5", "missing.yaml: no such file", "gatway: unknown key"):
        assert expected in told


def test_a_model_id_twice_in_one_file_is_refused(tmp_path):
    text = "llm_configs:\n- model_loading_config: {model_id: a}\n- model_loading_config: {model_id: a}\n"
    file = write(tmp_path, "config.yaml", text)
    assert f"{file}:3: llm_configs[1].model_loading_config.model_id: 'a' is used twice" in fault(file)


SERVES_OWN = f"""
http_options: {{port: 9199}}
proxy_location: Disabled
target_capacity: 50
applications:
- {BUILT}
  route_prefix: /llm
  logging_config: {{log_level: DEBUG}}
  autoscaling_policy:
  args: {{llm_configs: [{{model_loading_config: {{model_id: a}}}}]}}
"""


def test_settings_that_ray_serve_alone_obeys_are_named_with_their_lines(tmp_path):
    file = write(tmp_path, "serve.yaml", SERVES_OWN)
    (application,) = load_applications(file)
    assert [text.partition(": only Ray Serve")[0] for text in application.serve_only] == [
        f"{file}:2: http_options",
        f"{file}:4: target_capacity",
        f"{file}:8: applications[0].logging_config",
        f"{file}:7: applications[0].route_prefix",
    ]


def test_penstock_serve_refuses_them_and_a_batch_does_not(tmp_path):
    plan = make_plan(Arguments(sources=(write(tmp_path, "serve.yaml", SERVES_OWN),)))
    with pytest.raises(ConfigError, match=r"(?s)http_options.*target_capacity.*logging_config.*route_prefix"):
        plan.refuse_serve_only()


def test_what_ray_serve_would_do_anyway_is_no_setting(tmp_path):
    text = f"applications:\n- {BUILT}\n  route_prefix: /\n  args: {{llm_configs: [a.yaml]}}\n"
    write(tmp_path, "a.yaml", ONE)
    (application,) = load_applications(write(tmp_path, "serve.yaml", text))
    assert application.serve_only == ()


@pytest.mark.parametrize(
    "path", ["my_company.apps:build", "ray.serve.llm:build_openai_app", "penstock.serve"]
)
def test_a_foreign_builder_is_refused(path: str, tmp_path):
    text = f"applications:\n- import_path: {path}\n  args: {{llm_configs: [a.yaml]}}\n"
    write(tmp_path, "a.yaml", ONE)
    assert "import_path" in (told := fault(write(tmp_path, "serve.yaml", text)))
    assert "penstock.serve:build_openai_app" in told


def test_a_model_id_twice_over_applications_is_refused(tmp_path):
    text = f"""
applications:
- {{name: one, {BUILT}, args: {{llm_configs: [{{model_loading_config: {{model_id: a}}}}]}}}}
- {{name: two, {BUILT}, args: {{llm_configs: [{{model_loading_config: {{model_id: a}}}}]}}}}
"""
    assert "applications[1].args.llm_configs[0]" in fault(write(tmp_path, "config.yaml", text))


def test_a_model_id_twice_over_files_is_refused(tmp_path):
    assert "'a' is used twice" in fault([write(tmp_path, "a.yaml", ONE), write(tmp_path, "b.yaml", ONE)])


def test_a_missing_file_names_the_nearest_one(tmp_path):
    write(tmp_path, "qwen-0.5b.yaml", ONE)
    told = fault(str(tmp_path / "qwen-0.6b.yaml"))
    assert "no such file" in told
    assert told.endswith(f"Did you mean '{tmp_path / 'qwen-0.5b.yaml'}'?")


def test_a_missing_models_file_names_the_place_that_wants_it(tmp_path):
    told = fault(write(tmp_path, "config.yaml", "llm_configs:\n- models/a.yaml\n"))
    assert "config.yaml:2: llm_configs[0]: models/a.yaml: no such file in" in told


def test_a_folder_is_no_file(tmp_path):
    assert "is a folder" in fault(str(tmp_path))


def test_bad_yaml_names_line_and_column(tmp_path):
    file = write(tmp_path, "a.yaml", "model_loading_config:\n  model_id: a: b\n")
    assert fault(file).startswith(f"{file}:2:14: is not valid YAML: mapping values are not allowed here")


def test_an_unclosed_bracket_is_bad_yaml(tmp_path):
    assert "is not valid YAML" in fault(write(tmp_path, "a.yaml", "model_loading_config: {model_id: a\n"))


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path):
    file = write(tmp_path, "a.yaml", ONE + "accelerator_type: L4\naccelerator_type: L4\n")
    assert fault(file) == f"{file}:4: accelerator_type: is given twice; the first is in line 3."


def test_an_alias_to_itself_is_refused(tmp_path):
    assert "an alias refers to itself" in fault(write(tmp_path, "a.yaml", "engine_kwargs: &x\n  again: *x\n"))


def test_merged_defaults_are_not_given_twice(tmp_path):
    text = """
llm_configs:
- &base
  model_loading_config: {model_id: a}
  accelerator_type: L4
- <<: *base
  model_loading_config: {model_id: b}
"""
    configs = load_configs(write(tmp_path, "config.yaml", text))
    assert [(config.model_id, config.accelerator_type) for config in configs] == [("a", "L4"), ("b", "L4")]


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in fault(str(tmp_path / "a.yaml"))


def test_an_empty_file_says_what_is_wanted(tmp_path):
    file = write(tmp_path, "a.yaml", "")
    assert fault(file) == f"{file}: is empty; must be a mapping."


def test_an_application_without_models_is_refused(tmp_path):
    text = "applications:\n- {import_path: penstock.serve:build_openai_app, args: {}}\n"
    assert "applications[0].args.llm_configs: is missing" in fault(write(tmp_path, "config.yaml", text))


def test_overrides_of_serves_own_form_are_refused_with_the_right_place(tmp_path):
    text = """
applications:
- import_path: penstock.serve:build_openai_app
  deployments: [{name: LLMRouter, num_replicas: 2}]
  args: {llm_configs: [{model_loading_config: {model_id: a}}]}
"""
    assert "`deployment_config`" in fault(write(tmp_path, "config.yaml", text))


def test_a_config_remembers_where_it_was_read(tmp_path):
    file = write(tmp_path, "a.yaml", ONE + "engine_kwargs:\n  max_model_len: 5\n")
    (config,) = load_configs(file)
    where = config.location / "engine_kwargs" / "max_model_len"
    assert str(where) == f"{file}:4: engine_kwargs.max_model_len"


def test_where_it_was_read_makes_no_difference(tmp_path):
    (read,) = load_configs(write(tmp_path, "a.yaml", ONE))
    assert read == LLMConfig(model_loading_config={"model_id": "a"})


def test_builder_arguments_take_mappings_configs_and_paths(tmp_path):
    entries = [
        {"model_loading_config": {"model_id": "b"}},
        LLMConfig(model_loading_config={"model_id": "c"}),
        write(tmp_path, "a.yaml", ONE),
    ]
    args = LLMServingArgs.parse({"llm_configs": entries})
    assert [config.model_id for config in args.llm_configs] == ["b", "c", "a"]


def test_builder_arguments_by_name_tell_faults_with_their_path():
    with pytest.raises(ConfigError, match=r"llm_configs\[0\]\.llm_engin: unknown key"):
        LLMServingArgs(llm_configs=[{"model_loading_config": {"model_id": "a"}, "llm_engin": "sim"}])


def test_no_models_at_all_are_refused():
    with pytest.raises(ConfigError, match="llm_configs: is empty"):
        LLMServingArgs(llm_configs=[])


def test_a_mistyped_form_is_told_as_such(tmp_path: Path):
    file = tmp_path / "fleet.yaml"
    file.write_text("llm_confgs:\n- model_loading_config: {model_id: a}\n")
    with pytest.raises(ConfigError, match=r"1: .*unknown key 'llm_confgs'; did you mean 'llm_configs'"):
        load_applications(file)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        *(("foo://x", "foo"), ("simplecache::s33://x", "s33")),
        *((url, "") for url in ("s3://x", "gcs://x", "file:///x", "simplecache::s3://x", "folder")),
    ],
)
def test_storage_has_a_protocol_that_there_is(tmp_path, url: str, name: str):
    model = "llm_configs: [{model_loading_config: {model_id: a}}]"
    file = write(tmp_path, "a.yaml", f"jobs: {{storage: '{url}'}}\n{model}\n")
    said = (
        f"{file}:1: jobs.storage: unknown protocol '{name}'. Name a folder, or a URL such as s3://bucket/x."
    )
    assert quick_faults([file], all_here=True) == ([said] if name else [])


def test_the_home_of_nobody_is_a_folder_that_is_not_there(tmp_path: Path):
    keys = "gateway: {keys_file: ~no-such-user/keys.yaml}"
    model = "llm_configs: [{model_loading_config: {model_id: a, model_source: ~no-such-user/a}}]"
    said = quick_faults([write(tmp_path, "a.yaml", f"{keys}\n{model}\n")], all_here=True)
    assert any("keys.yaml: no such file" in text for text in said), said
    assert any("'~no-such-user/a' does not exist on this machine" in text for text in said), said


def test_a_name_that_the_system_refuses_is_no_fault_of_ours():
    name = "a" * 300
    assert fault(f"{name}.yaml") == f"{name}.yaml: cannot be read: File name too long."
    assert make_plan(Arguments(sources=(name,))).configs[0].model_id == name
