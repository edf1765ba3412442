"""deployment_config: checked by name and by value, like the options of Serve's deployment."""

import json

import pytest
from ray.serve.config import RequestRouterConfig

from penstock.config import GatewayConfig, LLMConfig
from penstock.errors import ConfigError
from penstock.serve import LLMServer, build_openai_app
from penstock.serve.gateway.catalogue import LiveState, ServedModel
from penstock.serve.routing.registry import policy

pytestmark = pytest.mark.parity("S5")


def deployed(**options):
    return LLMConfig(model_loading_config={"model_id": "m"}, deployment_config=options)


def problems(**options) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        deployed(**options)
    return caught.value.problems


def test_placement_in_it_is_refused_with_the_right_field_named():
    told = problems(placement_group_bundles=[], placement_group_strategy=[])
    assert sorted(text.partition(": ")[0] for text in told) == [
        "deployment_config.placement_group_bundles",
        "deployment_config.placement_group_strategy",
    ]
    assert all("`placement_group_config`" in text for text in told)


def test_names_that_are_always_refused_are_not_offered():
    (told,) = problems(foo=1)
    assert "placement_group_bundles" not in told


def test_accelerator_type_belongs_to_the_config_itself():
    (told,) = problems(ray_actor_options={"accelerator_type": "L4"})
    assert "`accelerator_type` of the LLMConfig" in told


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"autoscaling_config": {"min_replica": 1}}, "autoscaling_config.min_replica"),
        ({"autoscaling_config": {"max_replicas": 0}}, "autoscaling_config.max_replicas"),
        ({"num_replicas": 0}, "num_replicas"),
        ({"ray_actor_options": {"max_restarts": 3}}, "ray_actor_options.max_restarts"),
        ({"ray_actor_options": {"runtime_env": {"env_var": {}}}}, "ray_actor_options.runtime_env.env_var"),
    ],
)
def test_names_and_values_are_checked_inside_and_out(options, path):
    (told,) = problems(**options)
    assert told.startswith(f"deployment_config.{path}: ")


def test_a_maximum_below_the_minimum_is_refused():
    (told,) = problems(autoscaling_config={"min_replicas": 3, "max_replicas": 2})
    assert "max_replicas" in told
    assert "min_replicas" in told


def test_initial_replicas_lie_between_the_limits():
    (told,) = problems(autoscaling_config={"min_replicas": 1, "initial_replicas": 9, "max_replicas": 2})
    assert "initial_replicas" in told


def test_a_fixed_and_an_autoscaled_count_exclude_each_other():
    (told,) = problems(num_replicas=2, autoscaling_config={"max_replicas": 3})
    assert "num_replicas" in told
    assert "autoscaling_config" in told


def test_auto_goes_with_an_autoscaling_config():
    options = {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 3}}
    assert deployed(**options).deployment_config == options


def test_what_the_user_wrote_is_kept_as_it_is():
    options = {"max_ongoing_requests": 7, "autoscaling_config": {"max_replicas": 2}}
    assert deployed(**options).deployment_config == options


def test_unset_options_are_not_filled_in():
    assert deployed(autoscaling_config={"max_replicas": 2}).deployment_config["autoscaling_config"] == {
        "max_replicas": 2
    }


OURS = "penstock.serve.request_router.PrefixCacheAffinityRouter"


@pytest.mark.parametrize(
    ("router", "path"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"request_router_class": "round_robin"}, "request_router_class"),
        ({"request_router_class": "penstock.serve.request_router.KVAwareRouter"}, "request_router_class"),
        (
            {"request_router_class": OURS, "request_router_kwargs": {"tresh": 1}},
            "request_router_kwargs: tresh",
        ),
        ({"max_backoff_s": 0}, "max_backoff_s"),
    ],
)
def test_what_is_no_router_is_refused(router, path):
    (told,) = problems(request_router_config=router)
    assert path in told.split(": ")[0] + told, told


def test_arguments_of_no_router_are_refused():
    (told,) = problems(request_router_config={"request_router_kwargs": {"imbalanced_threshold": 9}})
    assert "request_router_class" in told


RAYS = "ray.serve.llm.request_router:PrefixCacheAffinityRouter"


CUT = {"do_eviction": True, "eviction_threshold_chars": 1000, "eviction_target_chars": 800}


@pytest.mark.parametrize("path", [OURS, OURS.replace("r.P", "r:P")])
@pytest.mark.parametrize(
    "kwargs",
    [{"match_rate_threshold": 0.5}, {"imbalanced_threshold": 5, **CUT, "eviction_interval_secs": 30}],
)
def test_our_prefix_router_is_the_policy_with_its_options(path, kwargs):
    router = {"request_router_class": path, "request_router_kwargs": kwargs}
    card = ServedModel.of(deployed(request_router_config=router))
    assert card.routing_policy == "prefix_affinity"
    assert card.policy_options == kwargs
    live = LiveState((card,), GatewayConfig())
    (card,) = LiveState.parse(json.loads(json.dumps(live.dump())), live).cards
    assert card.policy_options == kwargs
    policy(card.routing_policy, card.policy_options)


def test_a_cut_to_more_than_it_begins_at_is_refused():
    kwargs = {"do_eviction": True, "eviction_threshold_chars": 1000, "eviction_target_chars": 1001}
    router = {"request_router_class": OURS, "request_router_kwargs": kwargs}
    (told,) = problems(request_router_config=router)
    assert "eviction_target_chars, 1001, is more than eviction_threshold_chars, 1000" in told


def test_a_router_of_rays_kind_is_asked_for_each_request():
    card = ServedModel.of(deployed(request_router_config={"request_router_class": RAYS}))
    assert card.routing_policy == "serve_router"


@pytest.mark.parametrize("path", [OURS, RAYS])
def test_a_router_class_goes_with_no_other_policy(path):
    router = {"request_router_config": {"request_router_class": path}}
    with pytest.raises(ConfigError, match="routing_policy is 'round_robin'"):
        LLMConfig(
            model_loading_config={"model_id": "m"}, deployment_config=router, routing_policy="round_robin"
        )


@pytest.mark.parametrize("given", [{"max_backoff_s": 2.0}, RequestRouterConfig(max_backoff_s=2.0)])
@pytest.mark.parametrize("where", ["config", "options"])
def test_the_rest_of_a_router_config_reaches_serve(given, where):
    options = {"request_router_config": given}
    config = deployed(**(options if where == "config" else {}))
    deployment = LLMServer.as_deployment(options if where == "options" else {})
    router = deployment.bind(config)._bound_deployment._deployment_config.request_router_config
    assert (router.max_backoff_s, router.request_router_kwargs) == (2.0, {"penstock_model_id": "m"})


@pytest.mark.parametrize(
    ("path", "told"),
    [("my_module.MyRouter", "No module named 'my_module'"), ("collections.Counter", "is no subclass of ray")],
)
def test_a_class_that_is_no_router_is_refused_when_it_is_bound(path, told):
    options = {"request_router_config": {"request_router_class": path}}
    with pytest.raises(ConfigError, match=told):
        LLMServer.as_deployment(options).bind(deployed())
    with pytest.raises(ConfigError, match=f"request_router_class: .*{told}"):
        build_openai_app({"llm_configs": [deployed(**options)]})
