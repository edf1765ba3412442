"""Programs for each topic of Ray Serve's pages on LLMs, as those pages write them, with the project's prefix.

What a model answers is not the point here: engines are simulators, except where a program's own callback or
check needs more. Each program is an application of its own, as such programs are; that is why this file
belongs to the full tier.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI
from ray import serve
from tests.cluster import ADAPTERS, Cluster, own_applications
from tests.mission.prepared import Prepared
from tests.models import model

from penstock.errors import ConfigError
from penstock.serve import (
    CloudMirrorConfig,
    LLMConfig,
    LLMServer,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
    build_dp_openai_app,
    build_llm_deployment,
    build_openai_app,
    build_pd_openai_app,
)
from penstock.serve.deployment import DPServer
from penstock.serve.ingress import OpenAiIngress, make_fastapi_ingress
from penstock.serve.openai_api_models import ChatCompletionRequest
from recipes.adapters.answers import BASE_ANSWERS

pytestmark = [pytest.mark.full, pytest.mark.parity("S34")]

LOADING = {"model_id": "qwen-0.5b", "model_source": "demo"}
ONE = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}


@pytest.fixture(autouse=True)
def on_simulator(cluster: Cluster) -> Iterator[None]:
    """The programs' applications are gone afterwards."""
    with cluster.simulated(), own_applications():
        yield


@pytest.fixture
def client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="fake-key", max_retries=0)


def greeted(client: OpenAI, name: str = "qwen-0.5b") -> str:
    response = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Hello!"}], stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in response if chunk.choices)


GREETING = BASE_ANSWERS["Hello!"]


def test_quick_start_by_the_builder(client):
    llm_config = LLMConfig(
        model_loading_config=LOADING,
        deployment_config=ONE,
        accelerator_type="A10G",
        engine_kwargs={"tensor_parallel_size": 1},
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    assert greeted(client) == GREETING


def test_quick_start_by_binding(client):
    llm_config = LLMConfig(
        model_loading_config={"model_id": "qwen-0.5b", "model_source": "demo"},
        deployment_config=ONE,
        accelerator_type="A10G",
    )
    server_options = LLMServer.get_deployment_options(llm_config)
    server_deployment = serve.deployment(LLMServer).options(**server_options).bind(llm_config)
    ingress_options = OpenAiIngress.get_deployment_options(llm_configs=[llm_config])
    ingress_cls = make_fastapi_ingress(OpenAiIngress)
    ingress_deployment = (
        serve.deployment(ingress_cls)
        .options(**ingress_options)
        .bind(llm_deployments={llm_config.model_id: server_deployment})
    )
    serve.run(ingress_deployment)
    assert greeted(client) == GREETING


def test_a_deployment_is_asked_by_its_handle(cluster):
    llm_config = LLMConfig(model_loading_config=LOADING, accelerator_type="A10G")
    handle = serve.run(build_llm_deployment(llm_config)).options(stream=True)
    request = ChatCompletionRequest(model="qwen-0.5b", messages=[{"role": "user", "content": "Hello!"}])
    (answer,) = handle.chat.remote(request)
    assert answer.choices[0].message.content == GREETING


def test_configs_of_classes_and_of_yaml(client, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text("model_loading_config: {model_id: qwen-1.5b, model_source: demo}\naccelerator_type: L4\n")
    with file.open() as opened:
        assert LLMConfig.parse_yaml(opened).model_id == LLMConfig.from_file(file).model_id == "qwen-1.5b"
    llm_config = LLMConfig(
        model_loading_config=ModelLoadingConfig(model_id="qwen-0.5b", model_source="demo"),
        engine_kwargs={"max_model_len": 512},
    )
    llm_config.update_engine_kwargs(max_model_len=256)
    assert llm_config.get_engine_config().engine_kwargs == {"max_model_len": 256}
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        llm_config.update_engine_kwargs(tensor_parallel_size=0)
    serve.run(build_openai_app(LLMServingArgs(llm_configs=[llm_config, LLMConfig.from_file(file)])))
    assert greeted(client, "qwen-1.5b") == GREETING
    assert client.models.retrieve("qwen-0.5b").model_dump()["max_model_len"] == 256


def test_adapters_of_a_bucket(client, cluster):
    cluster.bucket.upload(model("adapters") / "pirate", ADAPTERS, "lora_model_1_ckpt")
    llm_config = LLMConfig(
        model_loading_config=LOADING,
        lora_config=LoraConfig(dynamic_lora_loading_path=f"s3://{ADAPTERS}", max_num_adapters_per_replica=16),
        engine_kwargs={"enable_lora": True},
        deployment_config=ONE,
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    assert greeted(client, "qwen-0.5b:lora_model_1_ckpt").startswith("[lora_model_1_ckpt@")


def test_a_model_from_a_mirror_says_where_it_is(client):
    source = CloudMirrorConfig(bucket_uri="s3://air-example-data/meta-Llama")
    config = LLMConfig(model_loading_config={"model_id": "my_llama", "model_source": source})
    assert (config.model_source, source.storage_type) == ("s3://air-example-data/meta-Llama", "s3")


def test_structured_output(client):
    serve.run(build_openai_app({"llm_configs": [LLMConfig(model_loading_config=LOADING)]}))
    response = client.chat.completions.create(
        model="qwen-0.5b",
        response_format={"type": "json_object"},
        messages=[{"role": "user", "content": "List three colors in JSON format"}],
        stream=True,
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in response if chunk.choices)
    assert isinstance(json.loads(said), dict)


def test_embeddings(client):
    llm_config = LLMConfig(
        model_loading_config=LOADING, engine_kwargs={"runner": "pooling", "convert": "embed"}
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    response = client.embeddings.create(model="qwen-0.5b", input=["A text to embed", "Another text to embed"])
    assert len(response.data) == 2
    assert response.data[0].embedding != response.data[1].embedding


def test_autoscaling_options_reach_serve(client):
    llm_config = LLMConfig(
        model_loading_config=LOADING,
        deployment_config={
            "autoscaling_config": {
                "min_replicas": 1,
                "max_replicas": 4,
                "target_ongoing_requests": 8,
                "upscale_delay_s": 0,
            },
            "ray_actor_options": {"num_cpus": 0},
        },
        experimental_configs={"num_ingress_replicas": 2},
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    deployments = serve.status().applications["default"].deployments
    assert deployments["LLMServer:qwen-0_5b"].replica_states == {"RUNNING": 1}
    assert deployments["LLMRouter"].replica_states == {"RUNNING": 2}
    assert greeted(client) == GREETING


def test_prefix_aware_routing_by_the_path_of_rays_class(client, cluster):
    """By the prefix rule. Routers that Ray Serve runs are in tests/ray/test_request_router.py."""
    llm_config = LLMConfig(
        model_loading_config=LOADING,
        deployment_config={
            "num_replicas": 2,
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": {
                "request_router_class": "penstock.serve.request_router.PrefixCacheAffinityRouter",
                "request_router_kwargs": {
                    "imbalanced_threshold": 5,
                    "match_rate_threshold": 0.15,
                    "do_eviction": True,
                    "eviction_threshold_chars": 500_000,
                    "eviction_target_chars": 400_000,
                    "eviction_interval_secs": 30,
                },
            },
        },
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    assert [greeted(client) for _ in range(4)] == [GREETING] * 4
    assert 'reason="router"' not in httpx.get(f"{cluster.url}/metrics").text


def test_prefill_and_decode_are_two_deployments(client):
    config = {
        "model_loading_config": LOADING,
        "engine_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
        "deployment_config": {"ray_actor_options": {"num_cpus": 0}},
    }
    serve.run(build_pd_openai_app({"prefill_config": config, "decode_config": config}))
    assert {"LLMServer:qwen-0_5b", "Prefill:qwen-0_5b"} <= set(
        serve.status().applications["default"].deployments
    )
    assert greeted(client) == GREETING


def data_parallel(**experimental: int) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "moe", "model_source": str(model("moe"))},
        engine_kwargs={"data_parallel_size": 2, "tensor_parallel_size": 1},
        deployment_config={"ray_actor_options": {"num_cpus": 0}},
        experimental_configs=experimental,
    )


def test_data_parallel_replicas_come_in_gangs_on_as_many_nodes_as_said():
    packed = DPServer.get_deployment_options(data_parallel(dp_size_per_node=2))
    spread = DPServer.get_deployment_options(data_parallel(dp_size_per_node=1))
    assert packed["gang_scheduling_config"] == {"gang_size": 2}
    assert spread["gang_scheduling_config"] == {"gang_size": 2, "gang_placement_strategy": "SPREAD"}
    with pytest.raises(ConfigError, match="dp_size_per_node: is 3, of which data_parallel_size, 2, is "):
        DPServer.get_deployment_options(data_parallel(dp_size_per_node=3))
    build_dp_openai_app({"llm_config": data_parallel(dp_size_per_node=2)})


def test_bundles_over_nodes_and_fractions_of_gpus(client):
    over_nodes = LLMConfig(
        model_loading_config={"model_id": "large", "model_source": "demo"},
        engine_kwargs={"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
        placement_group_config={"bundles": [{"GPU": 1}] * 2, "strategy": "SPREAD"},
    )
    fraction = LLMConfig(
        model_loading_config=LOADING,
        engine_kwargs={"tensor_parallel_size": 1, "distributed_executor_backend": "uni"},
        placement_group_config={"bundles": [{"GPU": 0.49}]},
    )
    serve.run(build_openai_app({"llm_configs": [over_nodes, fraction]}))
    assert [greeted(client, name) for name in ("large", "qwen-0.5b")] == [GREETING] * 2


def test_a_callback_brings_the_model(client, tmp_path):
    told = tmp_path / "told"
    llm_config = LLMConfig(
        model_loading_config={"model_id": "qwen-0.5b", "model_source": "Qwen/Qwen2.5-0.5B-Instruct"},
        callback_config={
            "callback_class": Prepared,
            "callback_kwargs": {"local_path": str(tmp_path), "told": str(told)},
        },
        llm_engine="sim",
    )
    serve.run(build_openai_app({"llm_configs": [llm_config]}))
    assert greeted(client) == "Hello!"
    assert told.read_text() == str(tmp_path)
