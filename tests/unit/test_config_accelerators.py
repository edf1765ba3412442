"""CPU or GPU, and whether the cluster has what a config asks for."""

import pytest

from penstock.config import LLMConfig, accelerator_kind, check_accelerator

pytestmark = pytest.mark.parity("S8")

NO_GPU = [{"CPU": 8.0}]
ONE_L4 = [{"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0}]


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)


def config(**values) -> LLMConfig:
    return LLMConfig(**{"model_loading_config": {"model_id": "m"}, **values})


@pytest.mark.parametrize(("nodes", "kind"), [(NO_GPU, "cpu"), (ONE_L4, "gpu"), ([], "cpu")])
def test_a_config_that_says_nothing_takes_what_the_cluster_has(nodes, kind):
    assert accelerator_kind(config(), nodes) == kind


def test_an_accelerator_type_is_a_gpu():
    assert accelerator_kind(config(accelerator_type="A10G"), NO_GPU) == "gpu"


def test_the_kind_that_is_given_wins():
    assert (
        accelerator_kind(config(accelerator_type="A10G", accelerator_config={"kind": "cpu"}), ONE_L4) == "cpu"
    )


def test_the_simulator_needs_no_gpu():
    assert accelerator_kind(config(llm_engine="sim", accelerator_type="A10G"), ONE_L4) == "cpu"


def test_the_simulator_may_be_placed_like_a_gpu_engine():
    assert accelerator_kind(config(llm_engine="sim", accelerator_config={"kind": "gpu"}), NO_GPU) == "gpu"


def test_gpus_of_the_actor_are_a_gpu():
    options = {"ray_actor_options": {"num_gpus": 0.5}}
    assert accelerator_kind(config(deployment_config=options), NO_GPU) == "gpu"


def test_bundles_without_gpus_are_cpu():
    assert accelerator_kind(config(placement_group_config={"bundles": [{"CPU": 1}]}), ONE_L4) == "cpu"


def test_bundles_with_gpus_are_a_gpu():
    assert accelerator_kind(config(placement_group_config={"bundle_per_worker": {"GPU": 1}}), NO_GPU) == "gpu"


def test_the_environment_runs_any_config_on_cpu(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "cpu")
    wished = config(accelerator_type="A10G", engine_kwargs={"tensor_parallel_size": 2})
    options = wished.get_serve_options(nodes=ONE_L4)
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}
    assert "placement_group_bundles" not in options


def test_a_type_that_no_node_has_is_told_with_what_the_cluster_has():
    told = check_accelerator(config(accelerator_type="A10G"), [*ONE_L4, *NO_GPU])
    assert told == (
        "model 'm': accelerator_type: no node has 'A10G'; the cluster has 1 GPU and 16 CPUs on 2 nodes, "
        "of type L4. PENSTOCK_ACCELERATOR=cpu (or --accelerator cpu) runs it on CPU."
    )


def test_a_type_that_is_nearly_right_names_the_right_one():
    nodes = [{"GPU": 4.0, "CPU": 8.0, "accelerator_type:A10G": 1.0}]
    assert "Did you mean 'A10G'?" in (check_accelerator(config(accelerator_type="a10"), nodes) or "")


def test_a_cluster_without_gpus_has_neither_a_type_nor_the_kind():
    assert "0 GPUs and 8 CPUs on 1 node." in (check_accelerator(config(accelerator_type="L4"), NO_GPU) or "")
    assert "no node has a GPU" in (
        check_accelerator(config(accelerator_config={"kind": "gpu"}), NO_GPU) or ""
    )


def test_a_type_that_a_node_has_is_fine():
    assert check_accelerator(config(accelerator_type="L4"), ONE_L4) is None


def test_cpu_configs_are_fine_everywhere():
    assert check_accelerator(config(), NO_GPU) is None
