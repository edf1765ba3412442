"""get_serve_options: what Serve is told about one model."""

import pytest

from penstock.autoscaling import KV_USAGE, RUNNING, WAITING, WAITING_TOKENS, needed
from penstock.config import LLMConfig
from penstock.config.derive.serve_options import AUTOSCALING, DEFAULTS, deployment_name

pytestmark = pytest.mark.parity("S5")


def config(**values) -> LLMConfig:
    fixed = {"model_loading_config": {"model_id": "m"}, "accelerator_config": {"kind": "cpu"}}
    return LLMConfig(**{**fixed, **values})


@pytest.mark.parametrize(
    ("model_id", "name"),
    [
        ("qwen-0.5b", "qwen-0_5b"),
        ("Qwen/Qwen2.5-7B", "Qwen--Qwen2_5-7B"),
        ("a#b", "a_b"),
        ("模型", "_6a21_578b"),
    ],
)
def test_deployment_names_are_safe_and_readable(model_id, name):
    assert deployment_name(model_id, "") == name


def test_the_name_has_our_prefix_by_default():
    assert config().get_serve_options()["name"] == "LLMServer:m"


def test_the_name_has_the_prefix_that_is_given():
    assert config().get_serve_options(name_prefix="VLLM:")["name"] == "VLLM:m"


def test_a_name_of_the_users_own_wins():
    assert config(deployment_config={"name": "mine"}).get_serve_options()["name"] == "mine"


def test_our_defaults_are_there():
    options = config().get_serve_options()
    assert {name: options[name] for name in DEFAULTS} == dict(DEFAULTS)


def test_the_users_options_win_over_our_defaults():
    options = config(
        deployment_config={"max_ongoing_requests": 7, "health_check_period_s": 3.0}
    ).get_serve_options()
    assert (options["max_ongoing_requests"], options["health_check_period_s"]) == (7, 3.0)


def test_autoscaling_goes_to_serve_as_it_was_written_and_with_our_policy():
    autoscaling = {"min_replicas": 1, "max_replicas": 2}
    options = config(deployment_config={"autoscaling_config": autoscaling}).get_serve_options()
    assert options["autoscaling_config"] == {**AUTOSCALING, **autoscaling}
    assert options["autoscaling_config"]["policy"] == {"policy_function": "penstock.autoscaling:policy"}


def test_the_users_own_policy_and_target_go_before_ours():
    autoscaling = {"policy": {"policy_function": "mine:policy"}, "target_ongoing_requests": 7}
    options = config(deployment_config={"autoscaling_config": autoscaling}).get_serve_options()
    assert options["autoscaling_config"].items() >= autoscaling.items()


@pytest.mark.parametrize(
    ("most", "target"), [(16, None), (32, None), (16, 16), (16, 40), (16, 15), (1000, None), (1, None)]
)
def test_a_full_replica_asks_for_another_one_while_requests_wait_in_gateways(most: int, target: int | None):
    scaling = {"max_replicas": 8} | ({"target_ongoing_requests": target} if target else {})
    given = {"max_ongoing_requests": most, "autoscaling_config": scaling}
    derived = config(deployment_config=given).get_serve_options()["autoscaling_config"]
    full = {RUNNING: most, WAITING: 0, WAITING_TOKENS: 0, KV_USAGE: 0.5}
    assert needed(full, derived["target_ongoing_requests"], 1) >= 2
    assert derived["target_ongoing_requests"] <= (target or 32)
    if target == 15:
        assert derived["target_ongoing_requests"] == target


def test_a_fixed_number_of_replicas_is_not_scaled():
    assert "autoscaling_config" not in config(deployment_config={"num_replicas": 2}).get_serve_options()


def test_without_a_gpu_there_is_no_placement_group():
    options = config().get_serve_options()
    assert "placement_group_bundles" not in options
    assert "placement_group_strategy" not in options


def test_with_a_gpu_bundles_and_strategy_go_together():
    options = config(accelerator_config={"kind": "gpu"}).get_serve_options()
    assert options["placement_group_bundles"] == [{"GPU": 1, "CPU": 2}]
    assert options["placement_group_strategy"] == "PACK"


def test_the_actor_has_one_cpu_and_no_gpu_by_default():
    assert config().get_serve_options()["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 0}


def test_runtime_env_layers_win_one_over_the_other_key_by_key():
    options = config(
        deployment_config={"ray_actor_options": {"runtime_env": {"env_vars": {"B": "actor", "C": "actor"}}}},
        runtime_env={"env_vars": {"C": "config"}, "pip": ["x"]},
    ).get_serve_options(
        default_runtime_env={"env_vars": {"A": "job", "B": "job"}, "working_dir": "s3://w.zip"}
    )
    assert options["ray_actor_options"]["runtime_env"] == {
        "env_vars": {"A": "job", "B": "actor", "C": "config"},
        "working_dir": "s3://w.zip",
        "pip": ["x"],
    }


def test_folders_of_a_runtime_env_are_given_to_serve_as_uris(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"working_dir": "code", "py_modules": ["/srv/tools", "s3://bucket/more.zip"]}
    options = config(runtime_env=given).get_serve_options()
    assert options["ray_actor_options"]["runtime_env"] == {
        "working_dir": f"local://{tmp_path}/code",
        "py_modules": ["local:///srv/tools", "s3://bucket/more.zip"],
    }


@pytest.mark.parity("S6")
def test_secrets_stand_in_no_option_of_serve():
    variables = {
        "HF_TOKEN": "s1",
        "AWS_SECRET_ACCESS_KEY": "s2",
        "HTTPS_PROXY": "http://me:s3@proxy:1",
        "A": "b",
    }
    options = config(
        runtime_env={"env_vars": variables},
        deployment_config={"ray_actor_options": {"runtime_env": {"env_vars": {"DB_PASSWORD": "s4"}}}},
    ).get_serve_options("VLLM:", default_runtime_env={"env_vars": {"JOB_API_KEY": "s5"}})
    assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "b"}}


def test_without_an_environment_none_is_passed():
    assert "runtime_env" not in config().get_serve_options()["ray_actor_options"]


def test_options_leave_the_config_as_it_is():
    source = config(deployment_config={"ray_actor_options": {"num_cpus": 2}})
    source.get_serve_options()["ray_actor_options"]["num_cpus"] = 9
    assert source.get_serve_options()["ray_actor_options"]["num_cpus"] == 2
