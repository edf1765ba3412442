"""Our tables of Serve's options against the installed Ray. Ray is imported, not started."""

import inspect
import typing

import pytest
import ray
from ray import serve
from ray.runtime_env import RuntimeEnv as RayRuntimeEnv
from ray.serve import config as serve_config
from ray.serve.schema import RayActorOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from penstock import ray_version
from penstock.config import LLMConfig
from penstock.config.derive.serve_options import DEFAULTS
from penstock.config.loading import load
from penstock.config.schema.deployment import (
    ActorOptions,
    AutoscalingOptions,
    BackpressureOptions,
    DeploymentOptions,
    GangOptions,
    RuntimeEnv,
)
from penstock.config.schema.request_router import RequestRouterOptions
from penstock.config.schema.sections import PlacementGroupConfig
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
