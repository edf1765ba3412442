"""deployment_config: checked by name and by value, like the options of Serve's deployment."""

import pytest

from penstock.config import LLMConfig
from penstock.errors import ConfigError

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
