"""An engine's actor, of a config: what Ray is asked for, and what no option shows."""

from __future__ import annotations

import os
from typing import Any

import pytest

from penstock.config import LLMConfig
from penstock.data.backends.in_process import in_process_engine, single_actor_options
from penstock.data.job.ray_workers import RayActorPool

GPUS = [{"CPU": 8.0, "GPU": 2.0, "accelerator_type:L4": 1.0}]
CPUS = [{"CPU": 8.0}]
FOLDER = {"working_dir": "/code", "env_vars": {"MODE": "x", "HF_TOKEN": "secret"}}
SHOWN = {"working_dir": "local:///code", "env_vars": {"MODE": "x"}}


def config(**fields: Any) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "m"}, **fields)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_ACCELERATOR", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.mark.parametrize("deployment", [{}, {"max_replicas_per_node": 1}])
def test_a_pipelines_engine_reserves_its_gpus_and_their_type(deployment: dict[str, Any]):
    two = config(
        accelerator_type="L4", engine_kwargs={"tensor_parallel_size": 2}, deployment_config=deployment
    )
    options = single_actor_options(two, GPUS)
    assert options["num_gpus"] == 2
    assert "L4" in (
        options.get("accelerator_type"),
        *(str(name)[-2:] for name in options.get("resources", {})),
    )


def test_a_pipelines_engine_on_cpu_reserves_none_unless_it_is_said():
    assert single_actor_options(config(), CPUS) == {"num_gpus": 0, "num_cpus": 0}
    given = {"ray_actor_options": {"num_cpus": 3, "resources": {"disk": 1}}}
    options = single_actor_options(config(deployment_config=given), CPUS)
    assert (options["num_cpus"], options["resources"]) == (3, {"disk": 1})


@pytest.mark.parametrize(
    "fields", [{"runtime_env": FOLDER}, {"deployment_config": {"ray_actor_options": {"runtime_env": FOLDER}}}]
)
def test_no_option_of_an_actor_shows_a_secret_which_its_process_has(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    model = config(**fields)
    assert single_actor_options(model, CPUS)["runtime_env"] == SHOWN
    assert RayActorPool(model, 1).options()[1]["runtime_env"] == SHOWN
    monkeypatch.setenv("HF_TOKEN", "")
    in_process_engine(model)
    assert os.environ["HF_TOKEN"] == "secret"
