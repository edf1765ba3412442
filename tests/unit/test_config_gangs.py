"""A model with data_parallel_size: Serve counts replicas where the user counts gangs."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from penstock.cli.models.check import placement_of
from penstock.config import LLMConfig, load_applications
from penstock.config.derive.serve_options import independent
from penstock.errors import ConfigError
from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("S24")


def config(size: int = 4, engine: str = "vllm", **fields: Any) -> LLMConfig:
    kwargs = {"data_parallel_size": size}
    return LLMConfig(
        model_loading_config={"model_id": "m"}, llm_engine=engine, engine_kwargs=kwargs, **fields
    )


def options(size: int = 4, **deployment: Any) -> dict[str, Any]:
    return config(size, deployment_config=deployment).get_serve_options()


def counts(**deployment: Any) -> tuple[int, int, int | None]:
    scaling = options(**deployment)["autoscaling_config"]
    return scaling["min_replicas"], scaling["max_replicas"], scaling.get("initial_replicas")


def test_one_gang_is_as_many_replicas():
    found = options()
    assert found["num_replicas"] == 4
    assert found["gang_scheduling_config"] == {"gang_size": 4}
    assert "placement_group_strategy" not in found


def test_num_replicas_counts_gangs():
    assert options(num_replicas=3)["num_replicas"] == 12


def test_limits_of_autoscaling_count_gangs():
    scaling = {"min_replicas": 1, "max_replicas": 3, "initial_replicas": 2, "upscale_delay_s": 5.0}
    assert counts(autoscaling_config=scaling) == (4, 12, 8)
    assert options(autoscaling_config=scaling)["autoscaling_config"]["upscale_delay_s"] == 5.0


def test_limits_that_are_not_given_are_serves_own_in_gangs():
    assert counts(autoscaling_config={"max_replicas": 2}) == (4, 8, None)
    assert counts(autoscaling_config={"min_replicas": 0, "max_replicas": 2}) == (0, 8, None)
    assert counts(num_replicas="auto") == (4, 400, None)


def test_its_replicas_are_told_and_chosen_among():
    assert dict(placement_of(config(2)))["replicas"] == "2, in gangs of 2"
    assert ServedModel.of(config(2)).scales


def test_its_bundles_on_gpus_are_told_with_where_gangs_lie():
    spread = {"gang_scheduling_config": {"gang_size": 2, "gang_placement_strategy": "SPREAD"}}
    gpu = {"accelerator_config": {"kind": "gpu"}}
    assert dict(placement_of(config(2, **gpu)))["bundles"].endswith("], each gang PACK")
    assert dict(placement_of(config(2, **gpu, deployment_config=spread)))["bundles"].endswith("SPREAD")


def test_one_engine_is_no_gang():
    found = options(1, num_replicas=3)
    assert found["num_replicas"] == 3
    assert "gang_scheduling_config" not in found


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"num_replicas": 4}),
        ({"num_replicas": 3}, {"num_replicas": 12}),
        ({"gang_scheduling_config": {"gang_size": 4}}, {"num_replicas": 4}),
        ({"autoscaling_config": {"max_replicas": 2}}, {"autoscaling_config": {"min": 4, "max": 8}}),
        ({"num_replicas": "auto"}, {"autoscaling_config": {"min": 4, "max": 400}}),
        (
            {"autoscaling_config": AutoscalingConfig(min_replicas=0, max_replicas=1)},
            {"autoscaling_config": {"min": 0, "max": 4}},
        ),
        ({"max_replicas_per_node": 1}, {"num_replicas": 4}),
    ],
)
def test_engines_without_experts_to_share_are_as_many_replicas_without_gangs(given, found):
    alone = independent(config(deployment_config=given, on_demand={}))
    found_options = alone.get_serve_options()
    assert "gang_scheduling_config" not in found_options
    counted = {"num_replicas": found_options.get("num_replicas")}
    if (scaling := found_options.get("autoscaling_config")) is not None:
        limits = {"min": scaling["min_replicas"], "max": scaling["max_replicas"]}
        counted = {"autoscaling_config": limits}
    assert counted == found
    assert alone.engine_kwargs == {}


def test_engines_of_sglang_are_in_one_replica():
    gpu = {"kind": "gpu"}
    found = config(2, "sglang", accelerator_config=gpu).get_serve_options()
    assert found["ray_actor_options"]["num_gpus"] == 2
    assert "gang_scheduling_config" not in found


def test_how_a_gang_lies_on_nodes_is_said_in_serves_words():
    found = options(gang_scheduling_config={"gang_size": 4, "gang_placement_strategy": "SPREAD"})
    assert found["gang_scheduling_config"] == {"gang_size": 4, "gang_placement_strategy": "SPREAD"}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"deployment_config": {"gang_scheduling_config": {"gang_size": 3}}}, "gang_size: is 3, but"),
        ({"deployment_config": {"max_replicas_per_node": 1}}, "max_replicas_per_node: does not go with"),
        (
            {"placement_group_config": {"bundle_per_worker": {"GPU": 1}, "strategy": "STRICT_PACK"}},
            "placement_group_config.strategy: does not go with",
        ),
        ({"on_demand": {}}, "on_demand: does not go with data_parallel_size"),
    ],
)
def test_what_does_not_go_with_gangs_is_refused(fields: dict[str, Any], where: str):
    with pytest.raises(ConfigError) as refused:
        config(**fields).get_serve_options()
    assert where in str(refused.value)


@pytest.mark.parity("S3")
def test_arguments_of_a_builder_of_one_model(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text(
        "applications:\n- import_path: penstock.serve.builders:build_dp_openai_app\n  args:\n"
        "    llm_config: {model_loading_config: {model_id: m}}\n    gateway: {port: 8001}\n"
    )
    (application,) = load_applications(str(file))
    assert [one.model_id for one in application.args.llm_configs] == ["m"]
    assert application.args.gateway.port == 8001
