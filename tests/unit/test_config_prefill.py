"""Prefill by replicas of its own: two forms of the same config, and the two halves that follow from it."""

import pytest

from penstock.cli.serve.ray_cluster import cpus_needed
from penstock.config import LLMConfig, LLMServingArgs
from penstock.config.derive.prefill import CONNECTOR, halves, prefill_half
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("S24", "S3")

DEMO = {"model_id": "m", "model_source": "demo"}


def config(**parts) -> LLMConfig:
    return LLMConfig(model_loading_config=DEMO, engine_kwargs={"max_num_seqs": 8}, **parts)


def test_what_is_not_given_is_as_the_model_s_own():
    decode, prefill = halves(config(prefill={"deployment_config": {"num_replicas": 2}}))
    assert prefill.engine_kwargs == decode.engine_kwargs
    assert prefill.get_serve_options()["num_replicas"] == 2
    assert "num_replicas" not in decode.get_serve_options()
    assert prefill.prefill is None


def test_what_is_given_stands_in_the_place_of_the_model_s_own():
    _, prefill = halves(config(prefill={"engine_kwargs": {"max_num_batched_tokens": 4096}}))
    assert prefill.engine_kwargs.keys() == {"max_num_batched_tokens", "kv_transfer_config"}


def test_both_halves_transfer_their_cache_by_nixl_unless_the_user_names_a_connector():
    assert [half.engine_kwargs["kv_transfer_config"] for half in halves(config(prefill={}))] == [
        CONNECTOR
    ] * 2
    own = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    named = LLMConfig(model_loading_config=DEMO, engine_kwargs={"kv_transfer_config": own}, prefill={})
    assert [half.engine_kwargs["kv_transfer_config"] for half in halves(named)] == [own] * 2


def test_without_it_a_model_is_whole():
    whole = config()
    assert halves(whole) == (whole,)
    assert prefill_half(whole) is None


def test_both_halves_are_counted_in_what_a_cluster_must_have():
    assert cpus_needed([config(prefill={"deployment_config": {"num_replicas": 3}})]) == 4


def test_two_configs_are_the_same_as_one_with_prefill():
    faster = LLMConfig(model_loading_config=DEMO, deployment_config={"num_replicas": 2})
    (joined,) = LLMServingArgs.parse({"prefill_config": faster, "decode_config": config()}).llm_configs
    decode, prefill = halves(joined)
    assert decode.engine_kwargs["max_num_seqs"] == 8
    assert "max_num_seqs" not in prefill.engine_kwargs
    assert prefill.get_serve_options()["num_replicas"] == 2


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"llm_engine": "sim", "prefill": {}}, "prefill: needs the engine 'vllm', not 'sim'"),
        ({"on_demand": {}, "prefill": {}}, "prefill and on_demand exclude each other"),
        ({"prefill": {"min_prompt_tokens": 0}}, "min_prompt_tokens: is 0; must be at least 1"),
        (
            {"prefill": {"deployment_config": {"autoscaling_config": {"min_replicas": 0}}}},
            "min_replicas must be at least 1",
        ),
    ],
)
def test_what_cannot_work_is_refused(parts, said):
    with pytest.raises(ConfigError, match=said):
        LLMConfig(model_loading_config=DEMO, **parts)


def test_the_halves_must_be_one_model():
    other = LLMConfig(model_loading_config={"model_id": "other", "model_source": "demo"})
    with pytest.raises(ConfigError, match="must be one model on one engine, not 'other'"):
        LLMServingArgs.parse({"prefill_config": other, "decode_config": config()})
    with pytest.raises(ConfigError, match="decode_config is missing"):
        LLMServingArgs.parse({"prefill_config": other})
