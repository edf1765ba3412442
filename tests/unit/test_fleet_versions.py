"""What control keeps of the versions of a fleet, without Ray."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from bucket import s3_server
from ray.exceptions import ActorUnavailableError
from tests.waiting import until

from penstock.cli.client.ctl import ReplicaTarget, _perform
from penstock.cli.client.fleet import (
    FleetChange,
    _followed,
    _stored,
    apply_planned,
    history,
    planned,
    rollback,
)
from penstock.cli.client.service import AdminTarget, Service
from penstock.config import LLMServingArgs
from penstock.config.fleet.plan import FleetPlan, plan
from penstock.config.schema.settings import Settings
from penstock.engines.vllm.arguments import check
from penstock.errors import (
    ConfigError,
    Conflict,
    NotFound,
    PreconditionFailed,
    Unauthorized,
    Unavailable,
    reasons,
    sentence,
)
from penstock.serve.builders import versions as versions_of
from penstock.serve.control import application, stored_fleet
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.fleet import APPLIED, APPLYING, SUPERSEDED, FleetVersions, _not_here
from penstock.serve.router.router import LLMRouter

START = {"gateway": {"api_key": "a-secret-of-the-command"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "control.sqlite"


async def test_the_next_control_has_them_and_no_other_user(file: Path):
    first = FleetVersions(DesiredStates(file).connection, "app")
    with pytest.raises(Conflict, match="a program has deployed it"):
        await first.show()
    first.record(START, {"llm_configs": [], "gateway": {"admin_key": "secret"}}, "penstock serve")
    shown = await FleetVersions(DesiredStates(file).connection, "app").show()
    assert (shown["version"], shown["who"], shown["outcome"]) == (1, "penstock serve", APPLIED)
    assert "secret" not in repr(shown)
    assert os.stat(file).st_mode & 0o077 == 0


async def test_the_last_50_are_kept(file: Path):
    fleet = FleetVersions(DesiredStates(file).connection, "app")
    for number in range(60):
        fleet.record(START, {"llm_configs": [number]}, "ci")
    assert [one.version for one in fleet.history()] == list(range(60, 10, -1))
    with pytest.raises(NotFound, match="no version 10 "):
        await fleet.rollback(10, "me")


def test_only_an_apply_that_goes_on_ends(file: Path, patched):
    notes: list[str] = []
    patched("penstock.progress.note", notes.append)
    fleet = FleetVersions(DesiredStates(file).connection, "app")
    version = fleet._add("ci", "a live", APPLYING, {}, {"a": 100}, {})
    fleet._end(version, SUPERSEDED)
    fleet._end(version, APPLIED)
    assert [one.outcome for one in fleet.history()] == [SUPERSEDED]
    (note,) = notes
    assert note.startswith("Version 1 of the fleet, by ci (a live): superseded. ")


class WithoutRay(FleetVersions):
    async def _planned(self, *_: object) -> tuple[FleetPlan, dict[str, str]]:
        return FleetPlan([], is_complete=False), {}

    async def _apply(self, version: int, wait_s: float = 0.0) -> None:
        self._end(version, APPLIED)


async def test_a_plan_compares_with_what_was_deployed_and_not_with_code_as_it_is_now(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched
):
    def hooked(name: str) -> Any:
        return fleet("a", gateway={"port": 8000}) | {
            "llm_configs": [fleet("a")["llm_configs"][0] | {"preprocessor": f"{name}:add"}]
        }

    patched("penstock.serve.control.fleet.ray.nodes", list)
    monkeypatch.setattr("penstock.serve.control.fleet.ray.available_resources", dict)
    monkeypatch.syspath_prepend(tmp_path)
    code, moved = tmp_path / "fleet_versions_hook.py", tmp_path / "fleet_versions_moved.py"
    code.write_text("def add(body): return body\n")
    deployments = versions_of(LLMServingArgs.parse(hooked(code.stem)))
    versions = FleetVersions(DesiredStates(file).connection, "app")
    versions.record({}, hooked(code.stem), "penstock serve", deployments)
    assert (await versions.plan(hooked(code.stem)))["is_empty"]
    code.write_text("def add(body): return {**body, 'seed': 1}\n")
    edited = await versions.plan(hooked(code.stem))
    assert edited["restarts"] == ["LLMServer:a"]
    assert not edited["is_empty"]
    code.rename(moved)
    del sys.modules[code.stem]
    assert (await versions.plan(hooked(moved.stem)))["restarts"] == ["LLMServer:a"]


async def test_an_apply_is_recorded_as_a_whole_or_not_at_all(file: Path):
    class Long(WithoutRay):
        async def _apply(self, version: int, wait_s: float = 0.0) -> None:
            await asyncio.Event().wait()

    def refused(action: int, table: str | None, *_: object) -> int:
        is_second = (action, table) == (sqlite3.SQLITE_UPDATE, "fleet")
        return sqlite3.SQLITE_DENY if is_second else sqlite3.SQLITE_OK

    def outcomes() -> list[str]:
        return [one.outcome for one in versions.history()]

    database = DesiredStates(file).connection
    versions = Long(database, "app")
    versions.record(START, fleet("a"), "penstock serve")
    await versions.apply(fleet("b"), "ada")
    goes_on = versions._applying
    assert goes_on is not None
    database.set_authorizer(refused)  # as if control were killed there, or its disk full
    with pytest.raises(sqlite3.Error):
        await versions.apply(fleet("c"), "bob", take_over=True)
    database.set_authorizer(None)
    assert outcomes() == [APPLYING, APPLIED]
    assert not goes_on.cancelling()
    await versions.apply(fleet("c"), "bob", take_over=True)
    assert outcomes() == [APPLYING, f"{SUPERSEDED} by version 3, by bob", APPLIED]
    assert goes_on.cancelling()
    versions.close()


def test_more_replicas_of_what_is_not_here_are_refused():
    def of(count: int) -> LLMServingArgs:
        (model,) = fleet("a")["llm_configs"]
        more = {"lora_config": {"dynamic_lora_loading_path": "/no/such"}}
        return LLMServingArgs.parse(
            {"llm_configs": [{**model, **more, "deployment_config": {"num_replicas": count}}]}
        )

    (said,) = _not_here(plan(of(1), of(2)), of(2))
    assert "'/no/such' does not exist on this machine" in said
    assert _not_here(plan(of(2), of(1)), of(1)) == []


@pytest.mark.parametrize(("cluster", "faults"), [("fixed", 1), ("growing", 0)])
async def test_models_may_wait_for_nodes_of_a_cluster_that_grows(
    file: Path, monkeypatch: pytest.MonkeyPatch, patched, cluster: str, faults: int
):
    """As where KubeRay has started the service, and not the command, which knows it by itself."""
    patched("penstock.serve.control.fleet.ray.nodes", list)
    monkeypatch.setattr("penstock.serve.control.fleet.ray.available_resources", dict)
    monkeypatch.setenv("PENSTOCK_CLUSTER", cluster)
    versions = FleetVersions(DesiredStates(file).connection, "app")
    versions.record({}, fleet("a"), "kuberay", {})
    gpu = {**fleet("b")["llm_configs"][0], "accelerator_config": {"kind": "gpu"}}
    planned = await versions.plan(
        {"llm_configs": [{**gpu, "placement_group_config": {"bundles": [{"GPU": 1}]}}]}
    )
    assert [len(planned["faults"]), len(planned["notes"])] == [faults, 1 - faults]


class Deployed(FleetVersions):
    def _deploy(self, version: int) -> None:
        """It runs at once."""


async def test_the_next_control_hears_gateways_before_it_says_applied(
    file: Path, monkeypatch: pytest.MonkeyPatch, patched
):
    patched("penstock.serve.control.application.state", lambda _: ("RUNNING", {}))
    monkeypatch.setattr("penstock.serve.control.fleet._LOOK_S", 0.001)
    monkeypatch.setattr("penstock.serve.control.fleet.GONE_S", 0.2)
    faults: list[str] = []
    versions = Deployed(DesiredStates(file).connection, "app", lambda: faults)
    versions._add("ci", "a live", APPLYING, {}, {}, {})
    asyncio.get_running_loop().call_later(0.2, faults.append, "no keys")  # before the wait has begun
    versions.resume()
    await until(lambda: versions.history()[0].outcome != APPLYING)
    assert versions.history()[0].outcome == "failed: a gateway stays as it was, and tries again: no keys"


async def test_what_becomes_of_an_apply_is_written_once_the_disk_has_room(
    file: Path, monkeypatch: pytest.MonkeyPatch, patched, caplog: pytest.LogCaptureFixture
):
    patched("penstock.serve.control.application.state", lambda _: ("DEPLOY_FAILED", {"": "no room"}))
    for name in ("_LOOK_S", "_LOOK_AGAIN_S", "GONE_S"):
        monkeypatch.setattr(f"penstock.serve.control.fleet.{name}", 0.01)
    database = DesiredStates(file).connection
    versions = Deployed(database, "app")
    versions._add("ci", "a live", APPLYING, {"llm_configs": []}, {}, {})
    database.execute("PRAGMA query_only = ON")
    versions.resume()
    await until(lambda: "cannot be written yet: attempt to write" in caplog.text)
    database.execute("PRAGMA query_only = OFF")
    await until(lambda: versions.history()[0].outcome == "failed: no room.")


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ("replicas", "a replica of 'a' keeps its adapters"),
        ("gateways", "a gateway stays as it was, and tries again: no keys"),
    ],
)
async def test_an_apply_whose_processes_try_again_is_applied_once_they_could(
    file: Path, monkeypatch: pytest.MonkeyPatch, patched, of: str, said: str
):
    def adapters() -> tuple[list[str], list[str]]:
        return [], [f"a replica of '{model}' keeps its adapters" for model in missing if of == "replicas"]

    def gateways() -> list[str]:
        return ["no keys" for _ in missing if of == "gateways"]

    def versions() -> FleetVersions:
        return Deployed(DesiredStates(file).connection, "app", gateways, adapters=adapters)

    missing = ["a"]
    patched("penstock.serve.control.application.state", lambda _: ("RUNNING", {}))
    for name in ("_LOOK_S", "_LOOK_AGAIN_S", "GONE_S"):
        monkeypatch.setattr(f"penstock.serve.control.fleet.{name}", 0.01)
    first = versions()
    first._add("ci", "a live", APPLYING, {}, {}, {})
    first.resume()
    await until(lambda: first.history()[0].outcome == f"failed: {said}")
    first.close()
    second = versions()
    second.resume()
    missing.clear()
    await until(lambda: second.history()[0].outcome == APPLIED)


def fleet(name: str, **sections: Any) -> Any:
    return {"llm_configs": [{"model_loading_config": {"model_id": name}, "llm_engine": "sim"}], **sections}


async def rolled_back(file: Path) -> WithoutRay:
    """Ada has applied b in the place of a, and Ben has taken it back."""
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    await versions.apply(fleet("b"), "ada")
    await asyncio.sleep(0)
    await versions.rollback(1, "ben")
    await asyncio.sleep(0)
    return versions


async def test_a_save_by_a_command_that_applied_it_undoes_no_rollback(file: Path):
    versions = await rolled_back(file)
    said = await versions.save(fleet("b"), "watch")
    assert isinstance(said, str)
    assert "version 2, by ada, and version 3, by ben" in said
    again = await WithoutRay(DesiredStates(file).connection, "app").save(fleet("b"), "watch")
    assert not isinstance(again, str)
    assert again["version"] == 4
    await versions.save(fleet("a"), "watch")
    await versions.apply(fleet("b"), "eve", take_over=True)
    assert versions.history()[1].outcome == "superseded by version 6, by eve"


async def test_a_file_that_says_what_it_said_undoes_no_rollback_where_only_changes_count(file: Path):
    """As after the end of the process that follows it."""
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "kuberay")
    assert await versions.save(fleet("a"), "kuberay", changed_only=True) == ""
    await versions.save(fleet("b"), "kuberay", changed_only=True)
    await asyncio.sleep(0)
    await versions.rollback(1, "ben")
    await asyncio.sleep(0)
    next_control = WithoutRay(DesiredStates(file).connection, "app")
    assert await next_control.save(fleet("b"), "kuberay", changed_only=True) == ""
    assert [one.who for one in versions.history()] == ["ben", "kuberay", "kuberay"]
    assert not isinstance(await next_control.save(fleet("c"), "kuberay", changed_only=True), str)


async def test_a_save_whose_caller_got_no_answer_can_be_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "kuberay")

    async def ends(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(WithoutRay, "apply", ends)
        with pytest.raises(asyncio.CancelledError):
            await versions.save(fleet("b"), "kuberay", changed_only=True)
    assert not isinstance(await versions.save(fleet("b"), "kuberay", changed_only=True), str)


async def test_a_save_that_is_asked_for_twice_is_applied_once(file: Path):
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "kuberay")
    saves = [versions.save(fleet("b"), "kuberay", changed_only=True) for _ in range(2)]
    first, second = await asyncio.gather(*saves)
    assert (isinstance(first, dict), second) == (True, "")
    assert len(versions.history()) == 2


async def test_a_save_that_ends_in_its_plan_undoes_no_rollback_when_it_is_made_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
):
    versions = await rolled_back(file)

    async def ends(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(WithoutRay, "plan", ends)
        with pytest.raises(asyncio.CancelledError):
            await versions.save(fleet("b"), "watch")
    assert "version 3, by ben" in str(await versions.save(fleet("b"), "watch"))
    assert len(versions.history()) == 3


async def test_each_form_of_a_file_is_kept_as_one(file: Path, tmp_path: Path):
    (model,) = fleet("b")["llm_configs"]
    (tmp_path / "b.yaml").write_text(json.dumps(model))
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    for given in ({"llm_config": model}, {"llm_configs": [str(tmp_path / "b.yaml")]}):
        await versions.apply({**given, "gateway": {"keys": []}}, "curl", take_over=True)
        await asyncio.sleep(0)  # until it is applied
        assert (await versions.show())["fleet"] == fleet("b", gateway={"keys": []})
    with pytest.raises(ConfigError, match="gateway"):
        await versions.apply(fleet("b", gateway=None), "curl", take_over=True)


@pytest.mark.parametrize(
    ("value", "said"), [(math.inf, "x is inf"), (date(2027, 1, 31), "x is of .* 'date'")]
)
async def test_a_value_that_json_does_not_have_is_refused(file: Path, value: object, said: str):
    """It would be stored as null, which no later plan could read."""
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    (model,) = fleet("b")["llm_configs"]
    with pytest.raises(ConfigError, match=said):
        await versions.save({"llm_configs": [{**model, "engine_kwargs": {"x": value}}]}, "watch")
    assert len(versions.history()) == 1


def test_a_start_is_recorded_anew_as_a_whole_or_stays(file: Path):
    def refused(action: int, table: str | None, *_: object) -> int:
        is_refused = (action, table) == (sqlite3.SQLITE_INSERT, "start")
        return sqlite3.SQLITE_DENY if is_refused else sqlite3.SQLITE_OK

    database = DesiredStates(file).connection
    versions = FleetVersions(database, "app")
    versions.record(START, fleet("a"), "kuberay")
    database.set_authorizer(refused)  # as if control were killed there, or its disk full
    with pytest.raises(sqlite3.Error):
        versions.record({}, fleet("a"), "kuberay")
    database.set_authorizer(None)
    assert versions._start().gateway == START["gateway"]


async def test_a_version_beyond_all_numbers_is_none(file: Path):
    versions = WithoutRay(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    with pytest.raises(NotFound, match="There is no version 99999999999999999999 of the fleet"):
        await versions.rollback(99_999_999_999_999_999_999, "ada")


async def test_a_rollback_to_what_runs_makes_no_version(file: Path):
    class Unchanged(WithoutRay):
        async def _planned(self, *_: object) -> tuple[FleetPlan, dict[str, str]]:
            return FleetPlan([]), {}

    versions = Unchanged(DesiredStates(file).connection, "app")
    versions.record(START, fleet("a"), "penstock serve")
    said = await versions.rollback(1, "ada")
    assert said["plan"]["is_empty"]
    assert [one.version for one in versions.history()] == [1]
    with pytest.raises(PreconditionFailed):
        await versions.rollback(1, "ada", if_match="7")


def test_each_model_that_cannot_start_is_named_with_its_reason(file: Path, patched):
    versions = FleetVersions(DesiredStates(file).connection, "app")
    versions._add("ci", "", APPLYING, fleet("a.b"), {}, {})
    said = {"LLMServer:a_b": "no weights", "LLMServer:old": "no weights either.", "LLMJobs": ""}
    parts = {name: SimpleNamespace(message=text) for name, text in said.items()}
    status = SimpleNamespace(value="DEPLOY_FAILED")
    found = SimpleNamespace(
        status=status, deployments=parts, message="Failed to update the deployments ['x']."
    )
    patched("penstock.serve.control.application.known", lambda: {"app": found})
    named = ["'a.b': no weights.", "LLMServer:old: no weights either."]
    assert versions._reasons(application.state("app")[1]) == named
    found.message = "no module 'x'"
    assert versions._reasons(application.state("app")[1]) == ["no module 'x'.", *named]


def test_the_same_reason_is_said_once():
    assert reasons(["No such weights.", "a: No such weights", "", "No such weights"]) == "a: No such weights"
    assert [sentence(one) for one in ("applied", "failed: no.")] == ["applied.", "failed: no."]


def test_an_apply_whose_version_the_history_has_lost_ends_with_a_sentence(capsys: pytest.CaptureFixture[str]):
    class Ahead(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            return {"held_up": [], "data": [{"version": 60, "outcome": "applied"}]}

    assert _followed(Ahead("", None, wait=5.0), 9) == 1
    assert "Version 9: later versions have taken its place" in capsys.readouterr().out


def test_who_waits_no_longer_is_told_that_the_apply_goes_on(capsys: pytest.CaptureFixture[str]):
    class Interrupted(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _followed(Interrupted("", None, wait=5.0), 9)
    assert "Version 9 goes on being applied" in capsys.readouterr().out


async def test_a_restart_of_serves_controller_hides_no_version(file: Path, patched):
    def restarting(_: str) -> None:
        raise ActorUnavailableError("it restarts", None)

    patched("penstock.serve.control.application.state", restarting)
    versions = FleetVersions(DesiredStates(file).connection, "app")
    versions._add("ci", "a live", APPLYING, {"llm_configs": []}, {}, {})
    shown = await versions.show()
    assert (shown["version"], shown["outcome"]) == (1, APPLYING)
    assert shown["held_up"] == ["Ray Serve does not say how it gets on; it is asked again."]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_service_that_restarts_is_waited_for_and_one_that_is_lost_for_a_minute(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Restarting(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            if is_lost or (left := next(silence, None)) == "port":
                raise Unavailable("Nothing answers.") from ConnectionRefusedError()
            if left:
                raise Unavailable("Control restarts.")
            return {"held_up": [], "data": [{"version": 9, "outcome": "applied"}]}

    silence = iter([*["port"] * 3, *["control"] * 20, *["port"] * 3])
    for name, seconds in (("_LOOK_S", 0.01), ("_SILENT_S", 0.02), ("_LOST_S", 0.25)):
        monkeypatch.setattr(f"penstock.cli.client.fleet.{name}", seconds)
    with pytest.raises(Unavailable, match=r"at URL for 0.25 s: .* version 9") if is_lost else nullcontext():
        assert _followed(Restarting("URL", None), 9) == 0
    assert ("Nothing answers at URL; still waiting" in capsys.readouterr().out) or not is_lost


PLANNED: dict[str, Any] = {
    "models": [],
    "restarts": [],
    "notes": [],
    "gpus": [0, 0, 0],
    "version": 8,
    "is_empty": False,
}


@pytest.mark.parametrize(
    ("path", "before", "after", "url", "key"),
    [
        ("port", 8000, 9000, "http://box:9000", "old"),
        ("tls", None, {"cert": "c", "key": "k"}, "https://box:8000", "old"),
        ("port", 7000, 9000, "http://box:8000", "old"),  # something in between listens on 8000
        ("admin_key", "*" * 10, "*" * 10, "http://box:8000", "new"),
    ],
)
def test_an_apply_is_followed_to_where_the_gateway_is_then(
    path: str, before: Any, after: Any, url: str, key: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    class Changing(FleetChange):
        def ask(self, method: str, *_words: Any, **_options: Any) -> dict[str, Any]:
            if method == "PUT":
                return {"version": 9}
            if self.url != url:
                raise Unavailable("Nothing answers.") from ConnectionRefusedError()
            if self.admin_key != key:
                raise Unauthorized("The key is wrong.")
            return {"held_up": [], "data": [{"version": 9, "outcome": "applied"}]}

    for name, seconds in (("_LOOK_S", 0.01), ("_SILENT_S", 0.02), ("_LOST_S", 0.25)):
        monkeypatch.setattr(f"penstock.cli.client.fleet.{name}", seconds)
    planned = {**PLANNED, "gateway": [{"path": path, "before": before, "after": after, "cost": "gateway"}]}
    target, new = Changing("http://box:8000", "old"), {"gateway": {"admin_key": key}}
    assert apply_planned(target, new, planned) == 0
    is_told = f"The service is at {url} now: name it with --url {url}." in capsys.readouterr().out
    assert is_told == (url != target.url)
    target = Changing("http://box:8000", "old", wait=0.0)
    assert apply_planned(target, new, planned) == 0
    assert (f"`penstock history --url {url}` shows" in capsys.readouterr().out) == (url != target.url)


async def test_each_waits_longer_for_a_plan_than_whom_it_asks(monkeypatch: pytest.MonkeyPatch):
    asked: dict[str, list[float]] = {"control": [], "gateway": []}

    class Control:
        async def ask(self, _call: str, _arguments: object, limit_s: float) -> None:
            asked["control"].append(limit_s)

    def answer(_self: object, _method: str, path: str, *_: object, timeout_s: float, **_more: object) -> Any:
        asked["gateway"].append(timeout_s)
        return {**PLANNED, "gateway": [], "plan": {**PLANNED, "gateway": [], "is_empty": True}}

    router: Any = SimpleNamespace(_control=Control())
    for call in ("plan", "apply", "rollback"):
        await LLMRouter._operate(router, f"fleet/{call}", {})
    monkeypatch.setattr(Service, "json", answer)
    target = FleetChange("http://box:8000", wait=0.0)
    apply_planned(target, fleet("a"), planned(target, fleet("a"), None))
    rollback(target)
    plans_of_two_s = 2 * check._TIME_LIMIT_S  # an apply waits for the plan of another one
    assert len(asked["gateway"]) == len(asked["control"]) == 3
    assert plans_of_two_s < min(asked["control"]) <= max(asked["control"]) < min(asked["gateway"])


async def test_each_waits_longer_for_an_operation_than_whom_it_asks(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []

    class Control:
        async def ask(self, _call: str, _arguments: object, limit_s: float) -> None:
            waits.append(limit_s)

    def answer(*_: object, timeout_s: float, **_more: object) -> dict[str, Any]:
        waits.append(timeout_s)
        return {"model": "m", "ok": True, "replicas": {}}

    router: Any = SimpleNamespace(_control=Control())
    await LLMRouter._operate(router, "sleep", {"timeout_s": 7.0})
    monkeypatch.setattr(Service, "json", answer)
    _perform(ReplicaTarget("http://box:8000", timeout_s=7.0), "sleep")
    of_gateway, of_command = waits
    assert 7.0 < of_gateway < of_command


def test_an_apply_that_takes_its_admin_key_away_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch):
    class Locked(FleetChange):
        def ask(self, method: str, *_words: Any, **_options: Any) -> dict[str, Any]:
            if method == "POST":
                return {"version": 9, "plan": {**PLANNED, "gateway": []}}
            raise Unauthorized("The key is wrong.")

    with pytest.raises(Unauthorized, match=r"The key is wrong. Version 9 goes on being applied"):
        rollback(Locked("http://box:8000", "old"))


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "jobs")
        return
    with s3_server("fleets") as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        yield "s3://fleets/penstock"


async def service(file: Path, storage: str, port: int = 8000, *models: str, **gateway: Any) -> WithoutRay:
    """One that has started with model `first`, and then applied these."""
    versions = WithoutRay(DesiredStates(file).connection, "app", port=port)
    versions.record(START, fleet("first", jobs={"storage": storage}), "penstock serve")
    for model in models:
        await versions.apply(fleet(model, jobs={"storage": storage}, gateway=gateway), "ada")
        await asyncio.sleep(0)  # until it is applied
    await stored(versions)
    return versions


async def stored(versions: FleetVersions) -> None:
    assert versions._storing is not None
    await versions._storing


async def test_a_service_that_is_lost_leaves_its_versions_without_secrets(tmp_path: Path, storage: str):
    options = {"cors": {"origins": ["https://a.example"], "credentials": True}}
    await service(tmp_path / "lost", storage, 8000, "a", "b", admin_key="the-key", **options)
    newest, *others = stored_fleet.read(storage)
    assert [(one.version, one.what) for one in others] == [(2, "no change"), (1, "started")]
    assert (newest.outcome, newest.fleet["llm_configs"]) == (APPLIED, fleet("b")["llm_configs"])
    assert newest.fleet["gateway"] == {"admin_key": "*" * 10, **options}
    same = await service(tmp_path / "same", storage)
    assert len(stored_fleet.read(storage)) == 4
    own = {one.at for one in same.history()}
    assert stored_fleet.pick(storage, None, own) == newest
    assert stored_fleet.pick(newest.file, 2, own) == others[0]
    with pytest.raises(NotFound, match=f"{storage}' has no version 4, other than by the running service"):
        stored_fleet.pick(storage, 4, own)
    await service(tmp_path / "other", storage, 9000)
    with pytest.raises(ConfigError, match=r"2 services. Name the file of one: .*app-9000-.*\.json"):
        stored_fleet.pick(storage, None, own)


async def test_storage_that_fails_delays_no_apply_and_has_all_later(tmp_path: Path):
    storage = tmp_path / "in-the-way"
    storage.touch()
    versions = await service(tmp_path / "x", str(storage), 8000, "a")
    assert [one.outcome for one in versions.history()] == [APPLIED, APPLIED]
    assert "; not stored at first: '" in versions.history()[0].what
    storage.unlink()
    await versions.apply(fleet("b", jobs={"storage": str(storage)}), "ada")
    await stored(versions)
    assert [one.version for one in stored_fleet.read(str(storage))] == [3, 2, 1]
    assert (storage / "fleet").stat().st_mode & 0o777 == 0o700


async def test_storage_that_hangs_is_said_while_versions_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patched
):
    versions, goes_on, write = await service(tmp_path / "x", str(tmp_path)), Event(), stored_fleet.write
    monkeypatch.setattr("penstock.serve.control.fleet._SILENCE_S", 0.01)
    patched(stored_fleet, "write", lambda *words: goes_on.wait(10) and write(*words))
    for model in ("a", "b"):
        await versions.apply(fleet(model, jobs={"storage": str(tmp_path)}), "ada")
        await until(lambda: "the storage does not answer" in versions.history()[-2].what)
    await until(lambda: [one.outcome for one in versions.history()] == [APPLIED] * 3)
    goes_on.set()
    await stored(versions)
    assert [one.version for one in stored_fleet.read(str(tmp_path))] == [3, 2, 1]


async def test_the_next_control_stores_what_the_last_one_could_not(tmp_path: Path):
    first = await service(tmp_path / "x", str(tmp_path / "jobs"))
    first.remark("a canary was taken back")
    first.close()
    second = WithoutRay(DesiredStates(tmp_path / "x").connection, "app", port=8000)
    second.resume()
    await stored(second)
    assert [one.what for one in stored_fleet.read(str(tmp_path / "jobs"))] == [
        "started; a canary was taken back"
    ]


def test_the_last_runs_are_kept_and_a_broken_file_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(stored_fleet, "_RUNS", 2)
    for service, began in (("app", 0), ("app-8000", 0), ("app-8000", 1), ("app-8000", 2)):
        one = stored_fleet.StoredVersion(1, began, "me", service, APPLIED, {})
        stored_fleet.write(str(tmp_path), stored_fleet.file_name(service, began), [one])
    (tmp_path / "fleet" / "app-7000-x.json").write_text("{}")
    assert [(one.what, one.at) for one in stored_fleet.read(str(tmp_path))] == [
        ("app-8000", 2),
        ("app-8000", 1),
        ("app", 0),
    ]
    assert "app-7000-x.json' is left out" in caplog.text
    readable = str(tmp_path / "fleet" / stored_fleet.file_name("app-8000", 2))
    with pytest.raises(ConfigError, match=rf"be the one meant: \S+-7000-x.json. Name .*: {readable}"):
        stored_fleet.pick(str(tmp_path), None, {0.0})
    assert stored_fleet.pick(readable, None, ()).at == 2
    with pytest.raises(NotFound, match="has no versions of a fleet"):
        stored_fleet.read(str(tmp_path / "fleet"))


def test_secrets_of_a_stored_version_are_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Running(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            return {"data": [{"at": 2.0}]}

    stars, target = "*" * 10, Running("", None)
    models = [{"runtime_env": {"env_vars": {"HF_TOKEN": stars}}}]
    kept = {"llm_configs": models, "gateway": {"api_key": stars}}
    rows = [stored_fleet.StoredVersion(7, at, "me", "a live", APPLIED, kept) for at in (2.0, 1.0)]
    stored_fleet.write(str(tmp_path), "app-x.json", rows)
    monkeypatch.setenv("HF_TOKEN", "hf-again")
    with pytest.raises(ConfigError, match=r"environment: gateway\.api_key as PENSTOCK_API_KEY\. Or"):
        _stored(target, str(tmp_path), None)
    monkeypatch.setenv("PENSTOCK_API_KEY", "key-again")
    given, what = _stored(target, str(tmp_path), "7")
    assert given["gateway"] == {"api_key": "key-again"}
    assert given["llm_configs"] == [{"runtime_env": {"env_vars": {"HF_TOKEN": "hf-again"}}}]
    assert what == f"version 7 of {tmp_path}/fleet/app-x.json"
    with pytest.raises(ConfigError, match="number of a version, and not"):
        _stored(target, str(tmp_path), "fleet.yaml")


def test_each_secret_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Running(FleetChange):
        def ask(self, *_words: Any, **_options: Any) -> dict[str, Any]:
            return {"data": []}

    stars = "*" * 10
    kept = {
        "a": [{"API_KEY": stars}, {"API_KEY": stars}],
        "lower-token": stars,
        "gateway": {"webhook": stars},
    }
    one = stored_fleet.StoredVersion(7, 1.0, "me", "a live", APPLIED, kept)
    stored_fleet.write(str(tmp_path), "app-x.json", [one])
    monkeypatch.setenv("API_KEY", "whose?")
    names = [("a[0].API_KEY", "API_KEY_1"), ("a[1].API_KEY", "API_KEY_2"), ("lower-token", "LOWER_TOKEN")]
    names += [("gateway.webhook", "PENSTOCK_WEBHOOK")]
    said = ", ".join(" as ".join(pair) for pair in names)
    with pytest.raises(ConfigError, match=re.escape(f"environment: {said}. Or")):
        _stored(Running("", None), str(tmp_path), None)
    for _, name in names:
        monkeypatch.setenv(name, name.lower())
    given, _ = _stored(Running("", None), str(tmp_path), None)
    assert given["a"] == [{"API_KEY": "api_key_1"}, {"API_KEY": "api_key_2"}]
    assert given["gateway"] == {"webhook": "penstock_webhook"}
    Settings.read()


def test_what_others_have_stored_cannot_change_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    one = stored_fleet.StoredVersion(7, 1e300, "a\x1b]0;b", "über\nc\u202e", APPLIED, {})
    stored_fleet.write(str(tmp_path), "app-x.json", [one])
    history(AdminTarget("", None), storage=str(tmp_path))
    line = r"  7  1e+300 s  a\x1b]0;b  über\nc\u202e  applied"
    assert capsys.readouterr().out.splitlines()[1:] == [line]
