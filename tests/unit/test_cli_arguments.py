from pathlib import Path

import pytest

from penstock.cli.models.engine_arguments import read_engine_words, read_quick_words
from penstock.cli.models.options import SERVE, Arguments, split
from penstock.cli.models.plan import make_plan
from penstock.cli.models.precheck import planned as checked_plan
from penstock.cli.serve.ray_cluster import cpus_needed
from penstock.config.derive.serve_options import runtime_env
from penstock.config.fleet.document import as_guest
from penstock.errors import ConfigError

YAML = """
llm_configs:
- model_loading_config: {model_id: one}
  llm_engine: sim
  deployment_config: {autoscaling_config: {min_replicas: 1, max_replicas: 5}}
- model_loading_config: {model_id: two}
  llm_engine: sim
gateway: {port: 9000, request_timeout_s: 7}
"""

SERVE_FILE = """
applications:
- import_path: penstock.serve.builders:build_openai_app
  runtime_env: {env_vars: {A: application, B: application, C: application}}
  args:
    llm_configs:
    - model_loading_config: {model_id: m}
      runtime_env: {env_vars: {C: model}}
      deployment_config:
        ray_actor_options: {runtime_env: {env_vars: {B: actor, C: actor}}}
"""


@pytest.fixture
def yaml(tmp_path: Path) -> str:
    (tmp_path / "models.yaml").write_text(YAML)
    return str(tmp_path / "models.yaml")


def test_words_from_the_first_dash_on_are_the_engines():
    assert split(["a", "b.yaml", "--max-model-len", "8192", "-tp", "2"]) == (
        ("a", "b.yaml"),
        ("--max-model-len", "8192", "-tp", "2"),
    )


def test_nothing_given_is_the_embedded_model():
    planned = make_plan(Arguments())
    (config,) = planned.configs
    assert config.model_id == "penstock-demo"
    assert config.model_loading_config.model_source == "demo"
    assert planned.gateway.port == 8000


def test_hub_id_is_served_under_its_own_name():
    (config,) = make_plan(Arguments(sources=("Qwen/Qwen2.5-0.5B",))).configs
    assert (config.model_id, config.model_source) == ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B")
    assert config.model_loading_config.model_source is None


def test_a_folder_gets_its_whole_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (config,) = make_plan(Arguments(sources=("./mine",))).in_folders({"./mine": "/models/mine"}).configs
    assert (config.model_id, config.model_source) == ("mine", "/models/mine")


@pytest.mark.parametrize(
    ("source", "name"), [("qwen", "qwen"), ("link/", "link"), ("..", "models"), ("", "penstock-demo")]
)
def test_folder_is_served_under_the_name_by_which_it_is_given(
    source: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    Path("link").symlink_to("qwen")
    if source == "..":
        monkeypatch.chdir("qwen")
    (config,) = make_plan(Arguments(sources=(source,))).configs
    assert config.model_id == name


def test_url_is_served_under_its_last_name():
    (config,) = make_plan(Arguments(sources=("s3://bucket/models/qwen/",))).configs
    assert (config.model_id, config.model_source) == ("qwen", "s3://bucket/models/qwen/")


def test_served_model_name_names_the_model():
    (config,) = make_plan(Arguments(sources=("a/b",), served_model_name="mine")).configs
    assert (config.model_id, config.model_source) == ("mine", "a/b")


def test_served_model_name_beside_a_file_is_refused(yaml: str):
    with pytest.raises(ConfigError, match="names its own"):
        make_plan(Arguments(sources=(yaml,), served_model_name="mine"))


def test_command_line_goes_over_the_file(yaml: str):
    planned = make_plan(Arguments(sources=(yaml,), port=9100, replicas=2))
    assert planned.gateway.port == 9100
    assert planned.gateway.request_timeout_s == 7
    assert [config.deployment_config for config in planned.configs] == [{"num_replicas": 2}] * 2


def test_files_settings_stay_where_the_command_says_nothing(yaml: str):
    planned = make_plan(Arguments(sources=(yaml,)))
    assert planned.gateway.port == 9000
    assert planned.configs[0].deployment_config["autoscaling_config"]["max_replicas"] == 5


def test_a_certificate_needs_both_its_files():
    tls = make_plan(Arguments(tls_cert="a.crt", tls_key="/b.key")).gateway.tls
    assert tls is not None
    assert (tls.cert, tls.key) == (str(Path.cwd() / "a.crt"), "/b.key")
    with pytest.raises(ConfigError, match="belong together"):
        make_plan(Arguments(tls_cert="a.crt"))


def test_a_certificate_in_a_file_counts_from_its_folder(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "llm_configs: [{model_loading_config: {model_id: m}, llm_engine: sim}]\n"
        "gateway: {tls: {cert: a.crt, key: keys/a.key}}\n"
    )
    arguments = Arguments(sources=(str(file),))
    planned = make_plan(arguments)
    assert planned.gateway.tls is not None
    assert planned.gateway.tls.key == str(tmp_path / "keys" / "a.key")
    with pytest.raises(ConfigError, match=r"serve.yaml:2: gateway.tls.cert: '.*a.crt' cannot be read"):
        checked_plan(arguments)


def test_two_files_that_disagree_about_the_gateway_are_refused(yaml: str, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text("llm_configs: [{model_loading_config: {model_id: three}}]\ngateway: {port: 9001}\n")
    with pytest.raises(ConfigError, match=r"gateway\.port is 9000 in one file and 9001 in another"):
        make_plan(Arguments(sources=(yaml, str(other))))


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("jobs", "off", "{max_batch_lines: 9}"),
        ("ingress_deployment_config", "{num_replicas: 2}", "{num_replicas: 3}"),
    ],
)
def test_what_files_set_beside_models_is_taken_once_and_must_agree(
    name: str, one: str, two: str, tmp_path: Path
):
    files = [str(tmp_path / f"{number}.yaml") for number in range(3)]
    for file, rest in zip(files, (f"\n{name}: {one}", "", f"\n{name}: {two}"), strict=True):
        text = f"llm_configs: [{{model_loading_config: {{model_id: m{Path(file).stem}}}}}]{rest}"
        Path(file).write_text(text)
    planned = make_plan(Arguments(sources=tuple(files[:2])))
    assert name in planned.serving.model_fields_set
    with pytest.raises(ConfigError, match=f"{name} is not the same in all files"):
        make_plan(Arguments(sources=tuple(files)))


def test_a_class_in_the_gateways_place_is_refused_with_where_it_runs(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "llm_configs: [{model_loading_config: {model_id: m}}]\n"
        "ingress_cls_config: {ingress_cls: 'my.shop:Shop'}\n"
    )
    with pytest.raises(
        ConfigError, match=r"own\.yaml:2: ingress_cls_config: .*run such a file with `serve run`"
    ):
        make_plan(Arguments(sources=(str(file),)))


def test_an_applications_runtime_env_is_its_models(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(SERVE_FILE)
    (config,) = make_plan(Arguments(sources=(str(file),))).configs
    assert runtime_env(config)["env_vars"] == {"A": "application", "B": "actor", "C": "model"}


def test_same_model_id_in_two_files_is_refused(yaml: str, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text("model_loading_config: {model_id: one}")
    with pytest.raises(ConfigError, match="'one' is used twice"):
        make_plan(Arguments(sources=(yaml, str(other))))


def test_engine_arguments_for_two_models_are_refused(yaml: str):
    with pytest.raises(ConfigError, match="--max-model-len applies to one model"):
        make_plan(Arguments(sources=(yaml,), engine_words=("--max-model-len", "5")))


def test_gpu_type_goes_to_every_model(yaml: str):
    planned = make_plan(Arguments(sources=(yaml,), accelerator="L4"))
    assert [config.accelerator_type for config in planned.configs] == ["L4", "L4"]


def test_engine_words_are_read_with_the_engines_names():
    words = ("--max-model-len", "4096", "--reply=yes indeed", "--step-base-ms", "0.5")
    planned = read_engine_words(make_plan(Arguments(sources=("echo",), engine="sim", engine_words=words)))
    assert planned.engine_words == ()
    assert planned.configs[0].engine_kwargs == {
        "max_model_len": 4096,
        "reply": "yes indeed",
        "step_base_ms": 0.5,
    }


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--max-modl-len", "5"), "did you mean 'max_model_len'"),
        (("--max-model-len",), "--max-model-len needs a value"),
        (("--max-model-len", "5", "other"), "'other' belongs to no option"),
    ],
)
def test_bad_engine_words_are_told(words: tuple[str, ...], sentence: str):
    planned = make_plan(Arguments(sources=("echo",), engine="sim", engine_words=words))
    with pytest.raises(ConfigError, match=sentence):
        read_engine_words(planned)


@pytest.mark.parametrize("engine", ["sim", "vllm"])
def test_mistyped_option_of_our_own_is_named(engine: str):
    planned = make_plan(Arguments(sources=("demo",), engine=engine, engine_words=("--prot", "9000")))
    with pytest.raises(ConfigError, match="`penstock serve` has --port"):
        read_quick_words(planned, SERVE)


def test_guests_variables_go_under_what_the_config_says():
    base = make_plan(Arguments(sources=("echo",), engine="sim")).serving
    once = as_guest(base, "node:10.0.0.1", {"A": "1", "B": "1"})
    twice = as_guest(once, "node:10.0.0.1", {"A": "2", "C": "2"})
    assert twice.llm_configs[0].runtime_env == {"env_vars": {"A": "1", "B": "1", "C": "2"}}


def test_guests_gateway_is_tied_to_its_node():
    base = make_plan(Arguments(sources=("echo",), engine="sim")).serving
    serving = as_guest(base, "node:10.0.0.1", {"A": "1"})
    assert serving.ingress_deployment_config["ray_actor_options"] == {
        "num_cpus": 0,
        "resources": {"node:10.0.0.1": 0.001},
        "runtime_env": {"env_vars": {"A": "1"}},
    }


def test_cpus_are_counted_over_all_replicas(yaml: str):
    assert cpus_needed(make_plan(Arguments(sources=(yaml,))).configs) == 6


@pytest.mark.parametrize(("scaling", "most"), [("", 100), (", autoscaling_config: {max_replicas: 70}", 70)])
def test_the_most_replicas_that_serve_may_start_by_itself_count(tmp_path: Path, scaling: str, most: int):
    text = "model_loading_config: {model_id: m}\nllm_engine: sim\ndeployment_config: {num_replicas: auto"
    (tmp_path / "m.yaml").write_text(f"{text}{scaling}}}\n")
    assert cpus_needed(make_plan(Arguments(sources=(str(tmp_path / "m.yaml"),))).configs) == most


def test_preprocessors_of_their_own_count(tmp_path: Path):
    own = "{autoscaling_config: {max_replicas: 4}, ray_actor_options: {num_cpus: 0.5}}"
    text = "model_loading_config: {model_id: m}\nllm_engine: sim\npreprocessor: copy:copy\n"
    (tmp_path / "m.yaml").write_text(f"{text}preprocessor_options: {own}\n")
    assert cpus_needed(make_plan(Arguments(sources=(str(tmp_path / "m.yaml"),))).configs) == 3
