"""What a config may say about routing, and what becomes of it."""

import pytest

from penstock.config import LLMConfig
from penstock.config.loading.load import load_configs
from penstock.config.schema.routing import POLICIES, SERVE_ROUTER
from penstock.errors import ConfigError
from penstock.serve import LLMRouter, build_openai_app
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.routing.registry import BY_NAME, policy, problems


def config(**given) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", **given)


def test_every_policy_that_a_config_may_name_exists():
    assert set(BY_NAME) - {SERVE_ROUTER} == set(POLICIES)


def test_a_misspelt_policy_is_told_with_what_is_allowed():
    with pytest.raises(ConfigError, match=r"'prefix_afinity'.*'prefix_affinity'.*round_robin"):
        config(routing_policy="prefix_afinity")


def test_an_unknown_option_of_routing_is_refused():
    with pytest.raises(ConfigError, match=r"session_heder.*session_header"):
        config(routing_config={"session_heder": "x-chat"})


def test_a_session_header_must_be_a_header_name():
    with pytest.raises(ConfigError, match="session_header"):
        config(routing_config={"session_header": "x chat"})


def test_the_card_carries_policy_and_header_to_the_gateway():
    card = ServedModel.of(config(routing_policy="a.b:C", routing_config={"session_header": "X-Chat"}))
    assert (card.routing_policy, card.session_header) == ("a.b:C", "x-chat")


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({}, False),
        ({"num_replicas": 1}, False),
        ({"num_replicas": 2}, True),
        ({"num_replicas": "auto"}, True),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}, True),
    ],
)
def test_the_card_knows_whether_a_second_replica_may_come(options, scales):
    assert ServedModel.of(config(deployment_config=options)).scales is scales


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:P", "No module named 'no_such_module'"),
        ("penstock.errors:Nothing", "has no attribute 'Nothing'"),
        ("penstock.errors:Error", "has no method `pick"),
        ("penstock.serve.fleet.table:Table", "missing 1 required positional argument"),
    ],
)
def test_an_own_class_that_cannot_serve_is_told_with_the_reason_and_what_is_allowed(name, why):
    with pytest.raises(ConfigError, match=why) as told:
        policy(name)
    assert "prefix_affinity" in str(told.value)


def test_every_model_whose_policy_cannot_be_had_is_told_with_its_place(tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model_loading_config: {model_id: m}\nllm_engine: sim\nrouting_policy: no_such:Policy\n")
    [told] = problems([config(), *load_configs(str(wrong))])
    assert told.startswith(f"{wrong}:3: routing_policy: 'no_such:Policy' cannot be made")


@pytest.mark.parametrize(
    "build",
    [
        lambda model: build_openai_app({"llm_configs": [model]}),
        lambda model: LLMRouter.as_deployment().bind([model]),
    ],
)
def test_a_policy_that_cannot_be_had_is_told_before_anything_starts(build):
    with pytest.raises(ConfigError, match="model 'm': routing_policy: 'no_such:Policy' cannot be made"):
        build(config(routing_policy="no_such:Policy"))
