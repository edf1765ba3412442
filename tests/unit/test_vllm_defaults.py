"""What vLLM is given where the user says nothing."""

from __future__ import annotations

import os

import pytest

import penstock
from penstock.config import LLMConfig
from penstock.engines.vllm.arguments import environment
from penstock.engines.vllm.arguments.defaults import Shape, lora_faults, with_defaults


def shape(source: str, **engine_kwargs: object) -> Shape:
    return Shape.of(
        LLMConfig(
            model_loading_config={"model_id": "m", "model_source": source},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
    )


def test_the_embedded_model_is_tiny_and_a_hub_id_is_not():
    assert shape(penstock.demo_model()) == Shape(cpu=True, tiny=True, workers=1)
    assert shape("org/model", tensor_parallel_size=2) == Shape(cpu=True, tiny=False, workers=2)


def test_one_worker_runs_in_the_core_and_many_beside_it():
    executors = [with_defaults({}, Shape(False, False, n))["distributed_executor_backend"] for n in (1, 2)]
    assert executors == ["uni", "mp"]


@pytest.mark.parametrize("decided", [{"gpu_memory_utilization": 0.5}, {"kv_cache_memory_bytes": 7}])
def test_a_user_who_sizes_the_kv_cache_has_decided(decided: dict[str, float]):
    arguments = with_defaults(decided, Shape(cpu=True, tiny=True, workers=1))
    assert {name: arguments.get(name) for name in ("gpu_memory_utilization", "kv_cache_memory_bytes")} == {
        "gpu_memory_utilization": None,
        "kv_cache_memory_bytes": None,
    } | decided


def test_engines_that_share_a_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    half = Shape(cpu=False, tiny=False, workers=1, gpu_share=0.5, memory_share=0.5)
    assert with_defaults({}, half)["gpu_memory_utilization"] == 0.46
    assert with_defaults({"gpu_memory_utilization": 0.3}, half)["gpu_memory_utilization"] == 0.3
    assert "gpu_memory_utilization" not in with_defaults({}, Shape(False, False, 1))
    monkeypatch.setattr("os.environ", {})
    environment.prepare(half)
    assert os.environ["VLLM_RAY_PER_WORKER_GPUS"] == "0.5"


@pytest.mark.parametrize(("awake", "share"), [(None, 0.25), (1, 1), (2, 0.5), (8, 0.25)])
def test_models_that_take_turns_on_a_gpu_share_its_memory_with_those_awake(awake: int | None, share: float):
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        placement_group_config={"bundle_per_worker": {"GPU": 0.25}},
        on_demand={"awake": awake} if awake else None,
    )
    assert Shape.of(config).memory_share == share


def test_structures_are_held_by_one_library_unless_the_user_names_another():
    def structures(**given: object) -> object:
        return with_defaults(given, Shape(False, False, 1))["structured_outputs_config"]

    assert structures() == {"backend": "xgrammar"}
    compact = {"disable_any_whitespace": True}
    assert structures(structured_outputs_config=compact) == {"backend": "xgrammar"} | compact
    assert structures(structured_outputs_config={"backend": "auto"}) == {"backend": "auto"}


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"OMP_NUM_THREADS": "8", "VLLM_PLUGINS": "theirs"})
    environment.prepare(Shape(cpu=True, tiny=True, workers=2))
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert os.environ["VLLM_PLUGINS"] == "theirs,penstock"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(("depth", "place"), [(70, "unset"), (71, "/tmp")])
def test_sockets_of_workers_fit_wherever_temporary_files_go(
    monkeypatch: pytest.MonkeyPatch, depth: int, place: str
):
    monkeypatch.setattr("tempfile.tempdir", "/".ljust(depth, "d"))
    monkeypatch.setattr("os.environ", {})
    environment.prepare(Shape(cpu=True, tiny=True, workers=2))
    assert os.environ.get("VLLM_RPC_BASE_PATH", "unset") == place


@pytest.mark.parametrize(
    "given", [{"max_loras": 16}, {"max_loras": 1, "max_cpu_loras": 17}, {"max_cpu_loras": 18}]
)
def test_sizes_for_adapters_that_are_enough_on_a_gpu_are_raised_on_cpu(given: dict[str, int]):
    def sizes(cpu: bool) -> tuple[int, int]:
        arguments = with_defaults(given, Shape(cpu, tiny=True, workers=1, adapters=16))
        return arguments["max_loras"], arguments["max_cpu_loras"]

    assert sizes(cpu=True) == (18, 18)
    assert sizes(cpu=False) == (given.get("max_loras", 16), given.get("max_cpu_loras", 17))


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
def test_a_size_that_no_engine_of_these_adapters_can_have_is_refused(accelerator: str):
    config = LLMConfig(
        model_loading_config={"model_id": "m"},
        accelerator_config={"kind": accelerator},
        lora_config={"dynamic_lora_loading_path": "s3://bucket/adapters", "max_num_adapters_per_replica": 16},
        engine_kwargs={"max_loras": 16, "max_cpu_loras": 16},
    )
    (fault,) = lora_faults(config)
    assert "max_cpu_loras: is 16" in fault
    assert "at least 17" in fault


def test_without_our_rules_vllm_fetches_nothing_that_no_list_names():
    bare = Shape(cpu=True, tiny=True, workers=1, media_rules=False)
    assert with_defaults({}, bare)["allowed_media_domains"] == ["none.invalid"]
    assert with_defaults({"allowed_media_domains": ["a.org"]}, bare)["allowed_media_domains"] == ["a.org"]
    assert "allowed_media_domains" not in with_defaults({}, Shape(cpu=True, tiny=True, workers=1))
