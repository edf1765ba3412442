"""`FleetFile`, which KubeRay deploys: it follows the file of a fleet, here in a folder as of a ConfigMap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from tests.ports import unused
from tests.waiting import wait_until

from penstock.serve.control import application
from penstock.serve.fleet_file import build_fleet_file

APP, FOLLOWER, KEY = "followed", "fleet-file", "admin-secret"

pytestmark = pytest.mark.parity("S29")


class ConfigMap:
    """As a kubelet mounts it: each file a link below `..data`, a link to a folder of its own each time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self.file = folder / "fleet.yaml"
        self.write("llm_configs: [{llm_engine: sim}]")
        self.file.symlink_to("..data/fleet.yaml")

    def write(self, text: str) -> None:
        name = f"..{next(self._count)}"
        (self._folder / name).mkdir()
        (self._folder / name / "fleet.yaml").write_text(text)
        (self._folder / "..data_tmp").symlink_to(name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")

    def serve(self, *aliases: str) -> None:
        cpu = {"llm_engine": "sim", "accelerator_config": {"kind": "cpu"}}
        model = {"model_loading_config": {"model_id": "a"}, "aliases": list(aliases), **cpu}
        self.write(yaml.safe_dump({"llm_configs": [model], "gateway": {"admin_key": KEY, "port": 1}}))


@pytest.fixture(scope="module")
def config_map(tmp_path_factory: pytest.TempPathFactory) -> ConfigMap:
    return ConfigMap(tmp_path_factory.mktemp("etc"))


@pytest.fixture(scope="module")
def http(serve_url: str, config_map: ConfigMap) -> Iterator[httpx.Client]:
    """A client of the service; its file is broken at first."""
    port = unused()
    gateway = {"host": "127.0.0.1", "port": port}
    follower = build_fleet_file({"file": str(config_map.file), "gateway": gateway, "app": APP})
    application.deploy(follower, FOLLOWER, "text")
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        yield client
    serve.delete(FOLLOWER)
    serve.delete(APP)


def models(http: httpx.Client) -> list[str]:
    with suppress(httpx.HTTPError):  # it starts
        found: list[dict[str, Any]] = http.get("/v1/models").raise_for_status().json()["data"]
        return [one["id"] for one in found]
    return []


def history(http: httpx.Client) -> list[tuple[str, str]]:
    """The oldest first."""
    rows = http.get("/admin/fleet/history").raise_for_status().json()["data"]
    return [(row["what"], row["outcome"]) for row in reversed(rows)]


def followers() -> list[str]:
    named: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in named if f"::{FOLLOWER}#" in one["name"]]


def test_a_fleet_starts_once_its_file_is_right(http: httpx.Client, config_map: ConfigMap):
    wait_until(followers)
    config_map.serve()
    wait_until(lambda: application.state(FOLLOWER)[0] == "RUNNING", 120)
    assert models(http) == ["a"]
    assert history(http) == [("started", "applied")]


def test_what_a_config_map_says_now_is_applied(http: httpx.Client, config_map: ConfigMap):
    config_map.serve("x")
    wait_until(lambda: history(http)[1:] == [("a live", "applied")])
    assert "x" in models(http)


def test_a_broken_file_leaves_the_fleet_and_the_audit_log_says_so(http: httpx.Client, config_map: ConfigMap):
    config_map.write("llm_configs: [{llm_engine: sim}]")

    def refused() -> list[str]:
        rows = http.get("/admin/fleet/audit").raise_for_status().json()["data"]
        return [row["what"] for row in rows if row["what"].startswith("Nothing changes:")]

    wait_until(refused)
    assert "model_loading_config" in refused()[0]
    assert "x" in models(http)


def test_the_end_of_its_follower_undoes_no_rollback(http: httpx.Client, config_map: ConfigMap):
    config_map.serve("y")
    wait_until(lambda: history(http)[2:] == [("a live", "applied")])
    http.post("/admin/fleet/rollback", json={"version": 2}).raise_for_status()
    wait_until(lambda: history(http)[3:] == [("rollback to version 2", "applied")])
    (old,) = followers()
    ray.kill(ray.get_actor(old, namespace="serve"))
    wait_until(lambda: followers() not in ([], [old]))
    wait_until(lambda: application.state(FOLLOWER)[0] == "RUNNING")
    assert "x" in models(http)
    config_map.serve("z")
    wait_until(lambda: "z" in models(http))
    assert [what for what, _ in history(http)[4:]] == ["a live"]
