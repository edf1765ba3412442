"""Our tables of Serve's options against the installed Ray. Ray is imported, not started."""

import inspect
import json
import re
import subprocess
import sys
import typing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from benchmarks.ray_configs import read
from ray import serve
from ray.runtime_env import RuntimeEnv as RayRuntimeEnv
from ray.serve import config as serve_config
from ray.serve.schema import RayActorOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from penstock import ray_version
from penstock.config import LLMConfig
from penstock.config.derive.serve_options import DEFAULTS
from penstock.config.loading import load
from penstock.config.messages.problems import warn_once
from penstock.config.schema.deployment import (
    ActorOptions,
    AutoscalingOptions,
    BackpressureOptions,
    DeploymentOptions,
    GangOptions,
    RuntimeEnv,
)
from penstock.config.schema.request_router import RequestRouterOptions
from penstock.config.schema.sections import (
    _RAYS_OWN,
    ExperimentalConfigs,
    LoraConfig,
    ModelLoadingConfig,
    PlacementGroupConfig,
)
from penstock.data import vLLMEngineProcessorConfig
from penstock.errors import ConfigError
from penstock.serve.replica.version import deployment

REMOVED = {"_func_or_class", "version"}


def config(**values) -> LLMConfig:
    return LLMConfig(**{"model_loading_config": {"model_id": "m"}, **values})


class Replica:
    pass


def differing(ours: set[str], rays: set[str]) -> set[str]:
    """Names that one has and the other not. An older Ray of the window may lack some of ours."""
    is_newest = tuple(map(int, ray.__version__.split(".")[:2])) >= ray_version.NEWEST
    return ours ^ rays if is_newest else rays - ours


def test_deployment_options_are_serves():
    rays = set(inspect.signature(serve.deployment).parameters) - REMOVED
    assert differing(set(DeploymentOptions.model_fields), rays) == set()


def test_an_option_that_this_ray_has_not_is_refused():
    with pytest.raises(ConfigError, match=f"Ray {ray.__version__}, .* has no deployment option max_serge"):
        deployment(Replica, {"num_replicas": 1, "max_serge": 1}, [])


@pytest.mark.parametrize(
    ("ours", "rays"),
    [
        (AutoscalingOptions, serve_config.AutoscalingConfig),
        (BackpressureOptions, getattr(serve_config, "BackpressureConfig", None)),  # since Ray 2.58
        (RequestRouterOptions, serve_config.RequestRouterConfig),
        (GangOptions, serve_config.GangSchedulingConfig),
        (ActorOptions, RayActorOptionsSchema),
    ],
)
def test_options_inside_are_rays(ours, rays):
    assert rays is None or differing(set(ours.model_fields), set(rays.model_fields)) == set()


@pytest.mark.parametrize(
    ("ours", "serve_only", "rays"),
    [
        (load.ServeApplication, load.SERVE_ONLY_IN_APPLICATION, ServeApplicationSchema),
        (load.ServeFile, load.SERVE_ONLY_IN_FILE, ServeDeploySchema),
    ],
)
def test_settings_of_a_serve_file_are_rays(ours, serve_only, rays):
    assert differing(set(ours.model_fields) | serve_only, set(rays.model_fields)) == set()


def test_the_runtime_env_is_rays():
    named = set(inspect.signature(RayRuntimeEnv.__init__).parameters) - {"self", "kwargs"}
    theirs = {name for name in named | RayRuntimeEnv.known_fields if not name.startswith("_")}
    assert set(RuntimeEnv.model_fields) == theirs


@pytest.mark.parametrize(
    ("field", "rays"),
    [
        ("gang_placement_strategy", serve_config.GangPlacementStrategy),
        ("runtime_failure_policy", serve_config.GangRuntimeFailurePolicy),
    ],
)
def test_choices_of_gangs_are_rays(field, rays):
    allowed = typing.get_args(GangOptions.model_fields[field].annotation)
    assert set(allowed) == {member.value for member in rays}


def test_choices_of_the_aggregation_are_rays():
    allowed = typing.get_args(AutoscalingOptions.model_fields["aggregation_function"].annotation)
    assert set(allowed) == {member.value for member in serve_config.AggregationFunction}


def test_placement_strategies_are_rays():
    from ray.util.placement_group import VALID_PLACEMENT_GROUP_STRATEGIES

    allowed = typing.get_args(PlacementGroupConfig.model_fields["strategy"].annotation)
    assert set(allowed) == set(VALID_PLACEMENT_GROUP_STRATEGIES)


def test_autoscaling_defaults_are_rays():
    theirs = serve_config.AutoscalingConfig()
    names = set(AutoscalingOptions.model_fields) - {"policy", "aggregation_function"}
    assert {name: getattr(AutoscalingOptions(), name) for name in names} == {
        name: getattr(theirs, name) for name in names
    }


def test_our_defaults_differ_from_serves_or_are_named_on_purpose():
    deployment = serve.deployment(Replica)
    same = [name for name, value in DEFAULTS.items() if getattr(deployment._deployment_config, name) == value]
    assert same == ["graceful_shutdown_timeout_s"]


def test_an_autoscaling_config_of_rays_own_class_is_accepted_and_gets_our_policy():
    autoscaling = serve_config.AutoscalingConfig(min_replicas=1, max_replicas=3)
    options = config(deployment_config={"autoscaling_config": autoscaling}).get_serve_options()
    taken = serve.deployment(Replica).options(**options)._deployment_config.autoscaling_config
    assert (taken.min_replicas, taken.max_replicas) == (1, 3)
    assert taken.policy.policy_function == "penstock.autoscaling:policy"


@pytest.mark.parametrize(
    "values",
    [
        {"accelerator_config": {"kind": "cpu"}},
        {"accelerator_config": {"kind": "cpu"}, "engine_kwargs": {"tensor_parallel_size": 2}},
        {"accelerator_type": "A10G", "engine_kwargs": {"tensor_parallel_size": 2}},
        {"accelerator_type": "A10G", "deployment_config": {"max_replicas_per_node": 2}},
        {
            "accelerator_type": "A10G",
            "engine_kwargs": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
            "deployment_config": {"ray_actor_options": {"memory": 100, "resources": {"disk": 1}}},
        },
        {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5}}},
        {"placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "STRICT_PACK"}},
        {"deployment_config": {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 2}}},
        {"deployment_config": {"autoscaling_config": {"min_replicas": 0, "max_replicas": 2}}},
        {"runtime_env": {"env_vars": {"A": "b"}}},
    ],
)
def test_serve_takes_the_options_that_we_compute(values):
    options = config(**values).get_serve_options()
    assert serve.deployment(Replica).options(**options).name == "LLMServer:m"


ROOT = Path(__file__).parents[2]
BUNDLES = {"bundles": [{"GPU": 1}, {"GPU": 1, "CPU": 2}], "strategy": "SPREAD"}
READ: list[tuple[type[Any], dict[str, Any]]] = [
    (LLMConfig, {"model_loading_config": {"model_id": "m"}}),
    (
        LLMConfig,
        {
            "model_loading_config": {"model_id": "m", "model_source": "s"},
            "accelerator_type": "L4",
            "engine_kwargs": {"max_model_len": 512},
            "deployment_config": {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            "lora_config": {"dynamic_lora_loading_path": "s3://b/a"},
            "placement_group_config": BUNDLES,
            "runtime_env": {"env_vars": {"A": "b"}},
            "experimental_configs": {"stream_batching_interval_ms": 50, "num_ingress_replicas": 2},
            "callback_config": {"callback_class": "a.B", "callback_kwargs": {"c": 1}},
        },
    ),
    (ModelLoadingConfig, {"model_id": "m", "model_source": "s", "tokenizer_source": "t"}),
    (LoraConfig, {"dynamic_lora_loading_path": "s3://b/a", "max_num_adapters_per_replica": 4}),
    (
        vLLMEngineProcessorConfig,
        {
            "model_source": "s",
            "batch_size": 8,
            "concurrency": (1, 2),
            "accelerator_type": "L4",
            "placement_group_config": BUNDLES,
            "runtime_env": {"env_vars": {"A": "b"}},
        },
    ),
]
READS_OTHERWISE = {
    "accelerator_config": "None until it is deployed: the cluster decides between CPU and GPU.",
    "llm_engine": "vllm in small letters; case does not matter.",
    "LoraConfig.download_timeout_s": "No limit by default.",
    "vLLMEngineProcessorConfig.engine_kwargs": "Without the task, which is in task_type.",
    "vLLMEngineProcessorConfig.task_type": "A str, to which Ray's enum is equal.",
    "vLLMEngineProcessorConfig.placement_group_config": "As given, without Ray's keys for what was not.",
    "vLLMEngineProcessorConfig.max_concurrent_batches": "None: it has no effect here.",
    "vLLMEngineProcessorConfig.should_continue_on_error": "True by default.",
    "vLLMEngineProcessorConfig.chat_template_stage": "None stands for Ray's True.",
    "vLLMEngineProcessorConfig.tokenize_stage": "None stands for Ray's True.",
    "vLLMEngineProcessorConfig.detokenize_stage": "None stands for Ray's True.",
    "vLLMEngineProcessorConfig.prepare_multimodal_stage": "None stands for Ray's False.",
    "vLLMEngineProcessorConfig.prepare_image_stage": "As above.",
}


@cache
def read_by_ray() -> list[dict[str, Any]]:
    """What Ray's own configs give back for READ."""
    asked = json.dumps([(kind.__name__, values) for kind, values in READ])
    command = [sys.executable, "-m", "benchmarks.ray_configs", asked]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("place", range(len(READ)), ids=lambda place: READ[place][0].__name__)
def test_a_config_gives_back_what_rays_does(place: int):
    kind, values = READ[place]
    ours, theirs = json.loads(json.dumps(read(kind(**values)))), read_by_ray()[place]
    accounted = {name for name in theirs if {name, f"{kind.__name__}.{name}"} & READS_OTHERWISE.keys()}
    names = theirs.keys() - accounted
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_a_placement_group_is_the_dict_that_was_given_whatever_was_given():
    for given in (BUNDLES, PlacementGroupConfig(**BUNDLES)):
        found = config(placement_group_config=given).placement_group_config
        assert found == BUNDLES
        assert found["bundles"][1]["CPU"] == 2


def test_a_callback_config_can_be_read_where_none_was_given():
    assert config().callback_config.callback_kwargs == {}


def test_experimental_keys_that_only_ray_reads_are_accepted_with_a_warning(caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    given = {"NIXL_SIDE_CHANNEL_PORT_BASE": 20000, "pd_tokenize_once": True}
    assert config(experimental_configs=given).experimental_configs == given
    assert "NIXL_SIDE_CHANNEL_PORT_BASE, pd_tokenize_once" in caplog.text
    with pytest.raises(ConfigError, match="unknown key 'num_ingres_replicas'"):
        config(experimental_configs={"num_ingres_replicas": 2})


def test_experimental_keys_are_rays():
    """Each key that Ray's LLM code looks up is known here."""
    folder = Path(ray.__file__).parent / "llm" / "_internal" / "serve"
    text = "\n".join(file.read_text() for file in folder.rglob("*.py"))
    named = set(re.findall(r'^\w+_KEY = "([A-Z_]+)"', text, re.MULTILINE))
    looked_up = set(re.findall(r'experimental_configs\s*\.get\(\s*"(\w+)"', text)) | named
    assert looked_up
    assert looked_up <= {*ExperimentalConfigs.model_fields, *_RAYS_OWN}
