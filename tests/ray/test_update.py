"""A fleet is deployed anew: only what changed restarts, and clients under load notice nothing. More in
test_update_more.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from ray import serve
from tests.ray.updating import APP, NeedsFile, no_request_is_lost, running
from tests.waiting import wait_until

from penstock.serve import LLMConfig, build_openai_app


@pytest.fixture
def url(serve_url: str, free_port: int) -> Iterator[str]:
    """Of an application of its own: that it is deployed again is the fact."""
    yield f"http://127.0.0.1:{free_port}"
    serve.delete(APP)


async def test_no_request_is_lost_and_no_stream_broken(url: str):
    await no_request_is_lost(url, (2, 1), gateways=2)


@pytest.mark.full  # tests of `penstock apply` show most of it
@pytest.mark.parity("X27")
def test_only_what_changed_restarts(url: str, tmp_path: Path):
    """An alias, an adapter, a limit, an option of the gateway's, a model more, a model less restart no other
    process.
    """
    (tmp_path / "legal").mkdir()
    (tmp_path / "legal" / "adapter_config.json").write_text("{}")
    first = deployed(url, tmp_path, a={"lora_config": {}}, b={})
    assert deployed(url, tmp_path, a={"lora_config": {}}, b={}) == first
    with httpx.Client(base_url=url) as kept:  # one connection, to one gateway
        lora = {"adapters": {"legal": str(tmp_path / "legal")}}
        models = {"a": {"aliases": ["x"], "lora_config": lora}, "b": {"engine_kwargs": {"reply": "b says"}}}
        second = deployed(url, tmp_path, **models)
        assert differing(first, second) == {"LLMServer:b"}
        asked = {"model": "x", "prompt": "hello"}
        assert kept.post("/v1/completions", json=asked).json()["model"] == "x"
        legal = {**asked, "model": "a:legal"}
        wait_until(lambda: kept.post("/v1/completions", json=legal).status_code == 200)
        call = serve.get_deployment_handle("LLMServer:a", APP).options(stream=True).completions.remote(asked)
        assert [one.model for one in call] == ["x"]
        control = serve.get_deployment_handle("LLMControl", APP)
        assert control.perform.remote("pause", model="a").result()["ok"]

        models["a"] |= {"deployment_config": {"num_replicas": 2, "max_queued_requests": 5}}
        third = deployed(url, tmp_path, {"max_body_bytes": 1000}, c={}, **models)
        assert differing(second, third) == {"LLMServer:a", "LLMServer:c"}
        assert second["LLMServer:a"] < third["LLMServer:a"]
        wait_until(lambda: control.status.remote("a").result()["a"]["desired"]["state"] == "paused")
        wait_until(lambda: kept.post("/v1/completions", json=asked | {"model": "c"}).status_code == 200)
        assert kept.post("/v1/completions", json={"model": "c", "prompt": 1000 * "a"}).status_code == 413

        last = deployed(url, tmp_path, **models)
        assert differing(third, last) == {"LLMServer:c"}
        assert kept.post("/v1/completions", json=asked | {"model": "c"}).status_code == 404
        assert [one["id"] for one in kept.get("/v1/models").json()["data"]] == ["a", "x", "b"]
        wait_until(lambda: set(control.status.remote().result()) == {"a", "b"})
        assert kept.post("/v1/completions", json={"model": "b", "prompt": 1000 * "a"}).status_code == 200


def test_a_model_that_could_not_start_is_tried_again(url: str, tmp_path: Path):
    given = {
        "preprocessor": NeedsFile,
        "preprocessor_options": {"arguments": {"file": str(tmp_path / "file")}},
        "deployment_config": {"max_constructor_retry_count": 1},
    }
    with pytest.raises(RuntimeError):
        deployed(url, tmp_path, a=given)
    (tmp_path / "file").touch()
    assert deployed(url, tmp_path, a=given)["LLMServer:a"]


def deployed(
    url: str, storage: Path, options: Mapping[str, object] | None = None, **models: dict[str, object]
) -> dict[str, set[int]]:
    """Deploys them; returns the processes of each deployment once none of an earlier one is left."""
    configs = [
        LLMConfig(model_loading_config={"model_id": name}, llm_engine="sim", **given)
        for name, given in models.items()
    ]
    gateway = {"port": httpx.URL(url).port, **(options or {})}
    given = {"llm_configs": configs, "gateway": gateway, "jobs": {"storage": str(storage)}}
    serve.run(build_openai_app(given), name=APP, route_prefix=None)
    assert httpx.get(f"{url}/v1/files", timeout=30).status_code == 200  # which starts the process of jobs
    replicas = {f"LLMServer:{config.model_id}": config.deployment_config for config in configs}
    wanted = {name: options.get("num_replicas", 1) for name, options in replicas.items()}
    wanted |= {"LLMRouter": 1, "LLMControl": 1, "LLMJobs": 1}
    wait_until(lambda: {name: len(pids) for name, pids in running().items()} == wanted)
    return running()


def differing(before: dict[str, set[int]], after: dict[str, set[int]]) -> set[str]:
    return {name for name in before | after if before.get(name) != after.get(name)}
