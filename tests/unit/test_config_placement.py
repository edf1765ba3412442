"""Bundles: mission/1's merge for engines that span nodes, one bundle for what fits one node."""

import pytest

from penstock.config import LLMConfig, accelerator_kind
from penstock.config.derive.placement import (
    executor,
    gang_size,
    gpu_share,
    merge_replica_actor_and_child_actor_bundles,
    place,
    resolved,
    spans_nodes,
    worker_bundles,
    workers,
)
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("S7")

GPU = {"accelerator_config": {"kind": "gpu"}}
CPU = {"accelerator_config": {"kind": "cpu"}}
TP2 = {"engine_kwargs": {"tensor_parallel_size": 2}}
RAY = {"engine_kwargs": {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}}


def config(*parts, **more) -> LLMConfig:
    values = {"model_loading_config": {"model_id": "m"}}
    for part in (*parts, more):
        values |= part
    return LLMConfig(**values)


def actor_options(**options):
    return {"deployment_config": {"ray_actor_options": options}}


def test_the_first_workers_bundle_takes_the_replica_in():
    merged = merge_replica_actor_and_child_actor_bundles(
        [{"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}], {"GPU": 0, "CPU": 1, "memory": 100}
    )
    assert merged == [{"GPU": 1, "CPU": 2, "memory": 100}, {"GPU": 1, "CPU": 1}]


def test_without_workers_the_replica_has_the_only_bundle():
    assert merge_replica_actor_and_child_actor_bundles([], {"CPU": 1}) == [{"CPU": 1}]


def test_without_a_replica_the_workers_bundles_stay():
    assert merge_replica_actor_and_child_actor_bundles([{"GPU": 1}, {"GPU": 1}], {}) == [
        {"GPU": 1},
        {"GPU": 1},
    ]


def test_without_anything_there_is_one_empty_bundle():
    assert merge_replica_actor_and_child_actor_bundles([], {}) == [{}]


def test_merging_leaves_its_arguments_alone():
    children, replica = [{"GPU": 1.0}], {"CPU": 1.0}
    merged = merge_replica_actor_and_child_actor_bundles(children, replica)
    merged[0]["GPU"] = 5
    assert (children, replica) == ([{"GPU": 1.0}], {"CPU": 1.0})


def test_workers_are_tensor_times_pipeline():
    assert workers(config(engine_kwargs={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})) == 8


def test_without_parallel_sizes_there_is_one_worker():
    assert workers(config(engine_kwargs={"tensor_parallel_size": None})) == 1


def test_the_ray_executor_gets_a_bundle_per_worker_merged_with_the_replica():
    placed = place(config(GPU, RAY, actor_options(memory=100)))
    assert placed.bundles == [{"GPU": 1, "CPU": 2, "memory": 100}, {"GPU": 1, "CPU": 1}]
    assert placed.actor == {"num_cpus": 1, "num_gpus": 0, "memory": 100}


def test_custom_resources_of_the_replica_are_in_its_bundle():
    placed = place(config(GPU, RAY, actor_options(resources={"fast_disk": 2})))
    assert placed.bundles == [{"GPU": 1, "CPU": 2, "fast_disk": 2}, {"GPU": 1, "CPU": 1}]


def test_what_fits_one_node_is_one_bundle_and_the_actor_holds_its_gpus():
    placed = place(config(GPU, TP2))
    assert placed.bundles == [{"GPU": 2, "CPU": 3}]
    assert placed.actor == {"num_cpus": 1, "num_gpus": 2}


def test_an_executor_of_ones_own_has_a_bundle_for_each_worker_where_they_are_spread():
    own = {"engine_kwargs": {"tensor_parallel_size": 2, "distributed_executor_backend": "my.Executor"}}
    group = {"bundle_per_worker": {"CPU": 1, "lane": 1}, "strategy": "STRICT_SPREAD"}
    placed = place(config(CPU, own, placement_group_config=group))
    assert placed.bundles == [{"CPU": 2, "GPU": 0, "lane": 1}, {"CPU": 1, "lane": 1}]
    assert placed.strategy == "STRICT_SPREAD"
    assert place(config(GPU, own)).bundles == [{"GPU": 2, "CPU": 3}]


def test_one_gpu_is_one_bundle_too():
    placed = place(config(GPU))
    assert (placed.actor["num_gpus"], placed.bundles) == (1, [{"GPU": 1, "CPU": 2}])


def test_sglangs_own_names_of_its_sizes_count():
    sizes = {"engine_kwargs": {"tp_size": 2, "pp_size": 2, "dp_size": 2}}
    assert place(config(GPU, sizes, llm_engine="sglang")).bundles == [{"GPU": 8, "CPU": 9}]


def test_sglangs_data_parallel_attention_shares_the_gpus():
    sizes = {"engine_kwargs": {"tp": 4, "dp_size": 4, "enable_dp_attention": True}}
    assert place(config(GPU, sizes, llm_engine="sglang"), [{"GPU": 1}]).bundles == [{"GPU": 4, "CPU": 5}]


def test_each_engine_of_a_gang_is_a_replica_with_its_own_gpus():
    placed = place(config(GPU, engine_kwargs={"tensor_parallel_size": 2, "data_parallel_size": 2}))
    assert (placed.actor["num_gpus"], placed.bundles) == (2, [{"GPU": 2, "CPU": 3}])


def test_the_accelerator_type_ties_gpu_bundles_to_its_nodes():
    (bundle,) = place(config(TP2, accelerator_type="A10G")).bundles
    assert bundle == {"GPU": 2, "CPU": 3, "accelerator_type:A10G": 0.001}


def test_the_accelerator_type_is_in_every_workers_bundle():
    placed = place(config(RAY, accelerator_type="L4"))
    assert [bundle["accelerator_type:L4"] for bundle in placed.bundles] == [0.001, 0.001]


def test_a_share_of_a_gpu():
    placed = place(config(placement_group_config={"bundle_per_worker": {"GPU": 0.5, "CPU": 1}}))
    assert (placed.actor["num_gpus"], placed.bundles) == (0.5, [{"GPU": 0.5, "CPU": 2}])


def test_a_share_of_a_gpu_given_as_an_actor_option_is_the_whole():
    placed = place(config(actor_options(num_gpus=0.5)))
    assert (placed.actor["num_gpus"], placed.bundles) == (0.5, [{"GPU": 0.5, "CPU": 2}])


def test_fewer_gpus_than_workers_are_refused():
    group = {"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}]}}
    with pytest.raises(ConfigError, match="placement_group_config: 2 workers"):
        place(config(group, TP2))


def test_workers_on_several_nodes_have_a_bundle_of_one_gpu_each():
    """Else vLLM refuses it, minutes later, in the replica."""
    many = {"placement_group_config": {"bundles": [{"GPU": 2, "CPU": 2}]}}
    with pytest.raises(ConfigError, match="placement_group_config: a bundle of 2 GPUs"):
        place(config(GPU, many, RAY))
    with pytest.raises(ConfigError, match="2 workers need a bundle with a GPU each, not 1"):
        place(config(GPU, {"placement_group_config": {"bundles": [{"GPU": 1}, {"CPU": 1}]}}, RAY))
    with pytest.raises(ConfigError, match="deployment_config: a bundle of 2 GPUs"):
        place(config(GPU, RAY, actor_options(num_gpus=1)))


WORKER, FIRST = {"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 2}


@pytest.mark.parametrize(
    ("sizes", "gang", "backend", "bundles"),
    [
        ({"tensor_parallel_size": 8}, 1, "mp", [{"GPU": 8, "CPU": 9}]),
        ({"tensor_parallel_size": 16}, 1, "ray", [FIRST, *[WORKER] * 15]),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 2}, 1, "ray", [FIRST, *[WORKER] * 15]),
        ({"tensor_parallel_size": 4, "pipeline_parallel_size": 2}, 1, "mp", [{"GPU": 8, "CPU": 9}]),
        ({"tensor_parallel_size": 4, "data_parallel_size": 4}, 4, "mp", [{"GPU": 4, "CPU": 5}]),
        ({"tensor_parallel_size": 8, "data_parallel_size": 2}, 2, "mp", [{"GPU": 8, "CPU": 9}]),
        ({"data_parallel_size": 16}, 16, "uni", [{"GPU": 1, "CPU": 2}]),
    ],
)
def test_two_nodes_of_eight_gpus(sizes, gang, backend, bundles):
    """What each replica of a gang reserves, or of one engine."""
    nodes = [{"GPU": 8, "CPU": 64}, {"GPU": 8, "CPU": 64}]
    decided = resolved(config(GPU, engine_kwargs=sizes), nodes)
    placed = place(decided)
    assert decided.engine_kwargs["distributed_executor_backend"] == backend
    assert (gang_size(decided), placed.bundles, placed.strategy) == (gang, bundles, "PACK")
    assert placed.actor["num_gpus"] == (0 if backend == "ray" else bundles[0]["GPU"])


@pytest.mark.parametrize(
    ("parts", "share"),
    [
        ([GPU], 1),
        ([CPU], 1),
        ([GPU, TP2], 1),
        ([actor_options(num_gpus=0.5)], 0.5),
        ([{"placement_group_config": {"bundle_per_worker": {"GPU": 0.25}}}], 0.25),
        ([GPU, RAY, {"placement_group_config": {"bundle_per_worker": {"GPU": 0.5}}}], 0.5),
        ([{"deployment_config": {"max_replicas_per_node": 2, "ray_actor_options": {"num_gpus": 0.4}}}], 0.4),
    ],
)
def test_the_part_of_a_gpu_that_a_worker_has(parts, share):
    assert gpu_share(config(*parts)) == share


def test_more_than_one_gpu_comes_whole():
    group = {"placement_group_config": {"bundles": [{"GPU": 1.5}]}}
    with pytest.raises(ConfigError, match=r"1\.5 GPUs"):
        place(config(group))


def test_beside_a_limit_per_node_the_actor_asks_for_all_by_itself():
    deployment = {"max_replicas_per_node": 1}
    placed = place(config(TP2, accelerator_type="L4", deployment_config=deployment))
    assert placed.bundles == ()
    assert placed.actor == {"num_cpus": 3, "num_gpus": 2, "accelerator_type": "L4"}


def test_on_cpu_nothing_is_grouped_and_no_gpu_is_asked():
    placed = place(config(CPU))
    assert (placed.actor, placed.bundles) == ({"num_cpus": 1, "num_gpus": 0}, ())


def test_on_cpu_every_worker_gets_a_cpu():
    assert place(config(CPU, TP2)).actor["num_cpus"] == 2


def test_on_cpu_the_users_number_of_cpus_wins():
    assert place(config(CPU, TP2, actor_options(num_cpus=6))).actor["num_cpus"] == 6


def test_on_cpu_described_bundles_lose_their_gpus():
    group = {"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1, "accelerator_type:L4": 0.001}]}}
    assert place(config(CPU, group)).bundles == [{"CPU": 2, "GPU": 0}]


def test_a_per_worker_bundle_is_repeated_for_all_workers():
    group = {"placement_group_config": {"bundle_per_worker": {"GPU": 1, "CPU": 4}}}
    assert worker_bundles(config(group, TP2), "gpu") == [{"GPU": 1, "CPU": 4}] * 2


def test_bundles_of_gpus_that_are_spread_are_bundles_of_cpus_on_cpu(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "cpu")
    group = {"bundles": [{"GPU": 1}] * 3, "strategy": "SPREAD"}
    placed = place(config(placement_group_config=group, engine_kwargs={"tensor_parallel_size": 3}))
    assert [bundle["CPU"] for bundle in placed.bundles] == [2, 1, 1]
    assert not any(bundle.get("GPU") for bundle in placed.bundles)


def test_a_spread_over_several_bundles_spans_nodes():
    group = {"placement_group_config": {"bundle_per_worker": {"GPU": 1}, "strategy": "STRICT_SPREAD"}}
    placed = place(config(group, TP2))
    assert placed.strategy == "STRICT_SPREAD"
    assert placed.bundles == [{"GPU": 1, "CPU": 1}, {"GPU": 1}]


def test_packed_bundles_are_one_node():
    group = {"placement_group_config": {"bundles": [{"GPU": 1, "CPU": 1}] * 2}}
    assert place(config(group, TP2)).bundles == [{"GPU": 2, "CPU": 3}]


def test_more_gpus_than_any_node_has_span_nodes():
    assert spans_nodes(config(GPU, TP2), nodes=[{"GPU": 1}, {"GPU": 1}])


def test_a_node_with_enough_gpus_holds_the_whole_engine():
    assert not spans_nodes(config(GPU, TP2), nodes=[{"GPU": 1}, {"GPU": 2}])


def test_an_executor_that_the_user_names_decides():
    mp = {"engine_kwargs": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}}
    assert not spans_nodes(config(GPU, mp), nodes=[{"GPU": 1}, {"GPU": 1}])


@pytest.mark.parametrize(
    ("parts", "nodes", "expected"),
    [
        ([GPU], None, "uni"),
        ([GPU, TP2], None, "mp"),
        ([GPU, TP2], [{"GPU": 1}], "ray"),
        ([CPU, TP2], None, "mp"),
    ],
)
def test_the_executor_is_always_named(parts, nodes, expected):
    assert executor(config(*parts), nodes) == expected


def test_a_resolved_config_needs_no_cluster_to_decide():
    decided = resolved(config(TP2), nodes=[{"GPU": 1, "CPU": 4}, {"GPU": 1, "CPU": 4}])
    assert accelerator_kind(decided) == "gpu"
    assert decided.engine_kwargs["distributed_executor_backend"] == "ray"


def test_a_resolved_simulator_keeps_its_own_arguments():
    assert resolved(config(llm_engine="sim"), nodes=[]).engine_kwargs == {}


def test_a_list_of_no_bundles_is_refused():
    with pytest.raises(ConfigError, match="bundles: is empty"):
        config(placement_group_config={"bundles": []})
