"""A fleet is deployed anew: only what changed restarts, and clients under load notice nothing. More in
test_update_more.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from ray import serve
from tests.ray.updating import APP, NeedsFile, no_request_is_lost
from tests.waiting import wait_until

from penstock.serve import LLMConfig, build_openai_app


@pytest.fixture
def url(serve_url: str, free_port: int) -> Iterator[str]:
    """Of an application of its own: that it is deployed again is the fact."""
    yield f"http://127.0.0.1:{free_port}"
    serve.delete(APP)


async def test_no_request_is_lost_and_no_stream_broken(url: str):
    await no_request_is_lost(url, (2, 1), gateways=2)


def test_only_what_changed_restarts(url: str):
    first = deployed(url, a={}, b={})
    assert deployed(url, a={}, b={}) == first
    models = {"a": {"aliases": ["x"]}, "b": {"engine_kwargs": {"reply": "b says"}}}
    second = deployed(url, **models)
    assert differing(first, second) == {"LLMRouter", "LLMServer:b"}
    asked = {"model": "x", "prompt": "hello"}
    assert httpx.post(f"{url}/v1/completions", json=asked).json()["model"] == "x"
    call = serve.get_deployment_handle("LLMServer:a", APP).options(stream=True).completions.remote(asked)
    assert [one.model for one in call] == ["x"]
    control = serve.get_deployment_handle("LLMControl", APP)
    assert control.perform.remote("pause", model="a").result()["ok"]

    models["a"] |= {"deployment_config": {"num_replicas": 2}}
    third = deployed(url, c={}, **models)
    assert differing(second, third) == {"LLMRouter", "LLMControl", "LLMServer:a", "LLMServer:c"}
    assert second["LLMServer:a"] < third["LLMServer:a"]
    wait_until(lambda: control.status.remote("a").result()["a"]["desired"]["state"] == "paused")
    last = deployed(url, **models)
    assert differing(third, last) == {"LLMRouter", "LLMControl", "LLMServer:c"}
    assert set(control.status.remote().result()) == {"a", "b"}


def test_a_model_that_could_not_start_is_tried_again(url: str, tmp_path: Path):
    given = {
        "preprocessor": NeedsFile,
        "preprocessor_options": {"arguments": {"file": str(tmp_path / "file")}},
        "deployment_config": {"max_constructor_retry_count": 1},
    }
    with pytest.raises(RuntimeError):
        deployed(url, a=given)
    (tmp_path / "file").touch()
    assert deployed(url, a=given)["LLMServer:a"]


def deployed(url: str, **models: dict[str, object]) -> dict[str, set[int]]:
    """Deploys them; returns the processes of each deployment once none of an earlier one is left."""
    configs = [
        LLMConfig(model_loading_config={"model_id": name}, llm_engine="sim", **given)
        for name, given in models.items()
    ]
    gateway = {"port": httpx.URL(url).port}
    serve.run(build_openai_app({"llm_configs": configs, "gateway": gateway}), name=APP, route_prefix=None)
    replicas = {f"LLMServer:{config.model_id}": config.deployment_config for config in configs}
    wanted = {name: options.get("num_replicas", 1) for name, options in replicas.items()}
    wanted |= {"LLMRouter": 1, "LLMControl": 1}
    wait_until(lambda: {name: len(pids) for name, pids in running().items()} == wanted)
    return running()


def running() -> dict[str, set[int]]:
    found, title = defaultdict[str, set[int]](set), f"ray::ServeReplica:{APP}:"
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if line.startswith(title):
            found[line.removeprefix(title).split(".")[0].split(" ")[0]].add(process.pid)
    return dict(found)


def differing(before: dict[str, set[int]], after: dict[str, set[int]]) -> set[str]:
    return {name for name in before | after if before.get(name) != after.get(name)}
