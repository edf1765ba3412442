"""`FleetFile` without Ray: what it deploys and records while Serve and control fail."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.exceptions import ActorUnavailableError

from penstock.config.fleet.document import StartSettings, read
from penstock.config.loading.watched_files import WatchedFiles
from penstock.errors import ConfigError, Unavailable
from penstock.serve import fleet_file
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.fleet import FleetVersions
from penstock.serve.fleet_file import FleetFile

CPU = {"llm_engine": "sim", "accelerator_config": {"kind": "cpu"}}


class Cluster:
    """Serve and control. states: what Serve says, one after the other; the last one stays."""

    def __init__(self, *states: str) -> None:
        self.states = list(states)
        self.fails: list[Exception] = []
        self.deployed: list[list[str]] = []
        self.recorded: list[object] = []
        self.saved: list[object] = []

    def state(self, _: str) -> tuple[str, dict[str, str]]:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0], {}

    def deploy(self, app: list[str], *_: object) -> None:
        self.deployed.append(app)
        if self.fails:
            raise self.fails.pop(0)

    def record(self, _start: object, fleet: Any, _versions: object) -> None:
        if self.fails:
            raise self.fails.pop(0)
        self.recorded.append([one["model_loading_config"]["model_id"] for one in fleet["llm_configs"]])

    def is_recorded(self) -> bool:
        return bool(self.recorded)

    def save(self, fleet: object, changed_only: bool) -> str:
        assert changed_only
        self.saved.append(fleet)
        return ""


def write(file: Path, name: str) -> None:
    file.write_text(yaml.safe_dump({"llm_configs": [{"model_loading_config": {"model_id": name}, **CPU}]}))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("_LOOK_S", "_ASK_AGAIN_S", "_DEPLOY_AGAIN_S"):
        monkeypatch.setattr(fleet_file, name, 0.01)
    write(file := tmp_path / "fleet.yaml", "a")
    return file


def follower(file: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> FleetFile:
    def built(args: Any) -> list[str]:
        return [config.model_id for config in args.llm_configs]

    monkeypatch.setattr(fleet_file, "build_openai_app", built)
    monkeypatch.setattr(
        fleet_file, "application", SimpleNamespace(state=cluster.state, deploy=cluster.deploy)
    )
    made: Any = FleetFile.__new__(FleetFile)
    made._file, made._app, made._start = str(file), "penstock", StartSettings({"port": 8000})
    made._control, made._files, made._deployed = cluster, WatchedFiles([str(file)]), None
    return made


def until_there(made: Any) -> None:
    for _ in range(20):
        if made._is_there():
            return
    pytest.fail("It is not there.")


def test_what_fails_for_a_moment_is_deployed_and_recorded_again(file: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster(
        "NOT_STARTED", "NOT_STARTED", "NOT_STARTED", "DEPLOY_FAILED", "DEPLOY_FAILED", "RUNNING"
    )
    cluster.fails = [RuntimeError("Serve restarts"), Unavailable("Control does not answer.")]
    until_there(follower(file, cluster, monkeypatch))
    assert len(cluster.deployed) >= 3
    assert cluster.recorded == [["a"]]


def test_a_fleet_that_runs_is_recorded_although_its_file_was_broken(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = Cluster("NOT_STARTED", *["DEPLOYING"] * 6, "RUNNING")
    made: Any = follower(file, cluster, monkeypatch)
    deploy = cluster.deploy

    def broken_meanwhile(app: list[str], *more: object) -> None:
        file.write_text("llm_configs: [{llm_engine: sim}]")
        deploy(app, *more)

    monkeypatch.setattr(fleet_file.application, "deploy", broken_meanwhile)
    until_there(made)
    assert (cluster.deployed, cluster.recorded) == ([["a"]], [["a"]])


def test_a_fleet_that_was_deleted_comes_back_with_the_next_save(file: Path, monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster("NOT_STARTED", "RUNNING")
    made: Any = follower(file, cluster, monkeypatch)
    until_there(made)
    made._save({}, False)
    assert (cluster.saved, cluster.deployed) == ([{}], [["a"]])
    write(file, "b")
    cluster.states, cluster.recorded = ["NOT_STARTED", "RUNNING"], []
    assert made._save({}, False) == ""
    assert (cluster.saved[1:], cluster.deployed[-1]) == ([read(str(file))], ["b"])
    assert cluster.recorded == [["b"]]


def test_a_control_that_lost_its_disk_is_not_told_of_an_earlier_fleet(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    cluster = Cluster("NOT_STARTED", "RUNNING")
    made: Any = follower(file, cluster, monkeypatch)
    until_there(made)
    cluster.recorded, cluster.fails = [], [RuntimeError("Serve restarts")]
    write(file, "c")  # while b runs, which control has applied
    made._save(read(str(file)), False)
    assert (cluster.deployed, cluster.recorded) == ([["a"], ["c"], ["c"]], [["c"]])


def test_a_save_while_serve_restarts_is_made_again(file: Path, monkeypatch: pytest.MonkeyPatch):
    made: Any = follower(file, Cluster("RUNNING"), monkeypatch)

    def restarting(_: str) -> None:
        raise ActorUnavailableError("it restarts", None)

    monkeypatch.setattr(fleet_file.application, "state", restarting)
    with pytest.raises(Unavailable, match="Ray Serve does not answer"):
        made._save({}, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tls": {"cert": "/c.pem", "key": "/k.pem"}}, "gateway.tls: KubeRay asks gateways by plain HTTP"),
        ({"processes": 2}, "gateway.processes: on Kubernetes each pod has one gateway"),
    ],
)
async def test_what_pods_decide_of_gateways_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
):
    monkeypatch.setattr(fleet_file.json_logs, "configure", lambda: None)
    monkeypatch.setattr(FleetFile, "_is_there", lambda _: True)
    monkeypatch.setattr(FleetFile, "_follow", lambda _: None)
    made: Any = FleetFile.__new__(FleetFile)
    await made.__init__(str(file), {"port": 8000})
    versions = FleetVersions(DesiredStates(file.with_name("control.sqlite")).connection, "app")
    versions.record(asdict(made._start), read(str(file)), "kuberay")
    edited = {**read(str(file)), "gateway": given}
    with pytest.raises(ConfigError, match=said):
        made._start.applied(edited)
    for change in (versions.plan(edited), versions.save(edited, "kuberay"), versions.apply(edited, "ada")):
        with pytest.raises(ConfigError, match=said):
            await change
