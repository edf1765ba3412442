"""What is desired of a model is reached by every replica, also by those that come later."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIStatusError, OpenAI
from ray import serve
from tests.cluster import session_folder

from penstock.engine import Manner
from penstock.engines.sim.engine import SimEngine
from penstock.errors import BadRequest, ModelNotFound, Unsupported
from penstock.serve import LLMConfig, LLMServer, build_openai_app

pytestmark = pytest.mark.parity("S25")

KEY = "admin's own"
APP = "operated"
LIMIT_S = 30


class Slow(SimEngine):
    """Takes a while to read other weights, and cannot pause without its cache."""

    async def update_weights(self, source: Path, version: str, mode: Manner = "wait") -> None:
        await super().update_weights(source, version, mode)
        await asyncio.sleep(2.0)

    async def pause(self, mode: Manner = "keep", clear_cache: bool = False) -> None:
        if clear_cache:
            raise Unsupported("Its cache stays.")
        await super().pause(mode)


class Tattler(LLMServer):
    """A server that tells its process and its replica's id."""

    async def __init__(self, llm_config: LLMConfig, **options: Any) -> None:
        await super().__init__(llm_config, engine_cls=Slow, **options)

    async def pid(self) -> tuple[str, int]:
        return self._id, os.getpid()

    async def state(self) -> tuple[str, str]:
        return self._id, self.steward.actual


class Fleet:
    """One model with two replicas, and the three ways to operate it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        self.control = serve.get_deployment_handle("LLMControl", APP)
        self.servers = serve.get_deployment_handle("LLMServer:sim", APP)

    def post(self, operation: str, **arguments: Any) -> dict[str, Any]:
        answer = self.http.post(f"/admin/{operation}", json=arguments)
        assert answer.status_code in (200, 502), answer.text
        return answer.json()

    def status(self) -> dict[str, Any]:
        return self.http.get("/admin/status").json()["sim"]

    def states(self) -> list[str]:
        return sorted(one["actual"] for one in self.status()["replicas"].values())

    def pids(self) -> dict[str, int]:
        return dict(self.servers.broadcast("pid").results(timeout_s=LIMIT_S))

    def resting(self) -> list[str]:
        """Ids of replicas that take no requests now, by their own word."""
        states = self.servers.broadcast("state").results(timeout_s=LIMIT_S)
        return [one for one, state in states if state != "ready"]

    def ask(self, **options: Any) -> str:
        client = OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
        return client.completions.create(model="sim", prompt="hello there", **options).choices[0].text

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock.cli", "ctl", *words, "--url", self.url]
        environment = os.environ | {"PENSTOCK_ADMIN_KEY": KEY}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fleet(serve_url: str) -> Iterator[Fleet]:
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        server_cls=Tattler,
        deployment_config={"num_replicas": 2},
    )
    gateway = {"admin_key": KEY, "wait_for_replica_s": 2.0}
    serve.run(build_openai_app({"llm_configs": [config], "gateway": gateway}), name=APP)
    yield Fleet(serve_url)
    serve.delete(APP)


@pytest.fixture(autouse=True)
def _awake(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.post("wakeup")
    fleet.post("resume")
    until(lambda: fleet.states() == ["ready", "ready"])


def until(condition: Callable[[], Any]) -> Any:
    """What it says, once that is true."""
    deadline = time.monotonic() + LIMIT_S
    while not (said := condition()):
        assert time.monotonic() < deadline, "not within the limit"
        time.sleep(0.1)
    return said


def test_asleep_it_holds_requests_for_a_while_and_answers_them_when_it_wakes(fleet: Fleet):
    done = fleet.post("sleep", level=1)
    assert done["ok"]
    assert [one["result"] for one in done["replicas"].values()] == ["asleep", "asleep"]
    health = fleet.http.get("/health")
    assert health.status_code == 200
    assert health.json()["models"]["sim"] == {"ready": 0, "resting": 2, "replicas": 2}
    with pytest.raises(APIStatusError, match="2 asleep") as refused:
        fleet.ask()
    assert refused.value.status_code == 503
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(fleet.ask)
        time.sleep(0.5)
        assert not asked.done()
        assert fleet.post("wakeup")["ok"]
        assert asked.result() == "hello there"


def test_who_comes_through_serves_proxy_is_told_of_the_faster_way(fleet: Fleet):
    assert fleet.ask() == "hello there"
    logs = (session_folder() / "logs").glob("worker-*.err")
    assert any("Requests come through Ray Serve's proxy" in log.read_text(errors="replace") for log in logs)


@pytest.mark.parametrize(("operation", "state"), [("sleep", "asleep"), ("pause", "paused")])
def test_a_replica_that_takes_the_place_of_another_comes_up_as_desired(
    fleet: Fleet, operation: str, state: str
):
    before = fleet.pids()
    fleet.post(operation)
    killed, pid = next(iter(before.items()))
    os.kill(pid, signal.SIGKILL)
    until(lambda: killed not in fleet.status()["replicas"])
    until(lambda: fleet.states() == [state, state])
    assert set(fleet.pids()) - set(before)
    fleet.post("wakeup")
    fleet.post("resume")
    assert fleet.states() == ["ready", "ready"]
    assert fleet.ask() == "hello there"


def test_one_replica_alone_and_the_other_takes_the_requests(fleet: Fleet):
    one, other = fleet.status()["replicas"]
    done = fleet.post("pause", replica=one)
    assert done["replicas"] == {one: {"result": "paused"}}
    assert fleet.states() == ["paused", "ready"]
    assert [fleet.ask() for _ in range(8)] == ["hello there"] * 8
    shown = fleet.status()
    assert shown["desired"]["state"] == "ready"
    assert shown["replicas"][one]["desired"]["state"] == "paused"
    assert shown["replicas"][other]["desired"]["state"] == "ready"
    fleet.post("resume")  # what is said to all goes before
    assert fleet.states() == ["ready", "ready"]


def test_what_no_replica_can_be_is_refused_and_desired_no_longer(fleet: Fleet):
    done = fleet.post("pause", clear_cache=True)
    assert [one["error"] for one in done["replicas"].values()] == ["Its cache stays."] * 2
    (first, *_) = done["replicas"]
    assert not fleet.post("pause", clear_cache=True, replica=first)["ok"]
    until(lambda: fleet.status()["replicas"][first]["reached"])
    status = fleet.status()
    assert [one["desired"]["state"] for one in (status, *status["replicas"].values())] == ["ready"] * 3
    assert not any("error" in one for one in status["replicas"].values())


def test_a_state_that_cannot_be_reached_is_named_and_changes_nothing(fleet: Fleet):
    done = fleet.post("update_weights", source="/no/such/folder", version="v7")
    assert not done["ok"]
    assert all("/no/such/folder" in one["error"] for one in done["replicas"].values())
    assert all(one["weights"] == "default" for one in fleet.status()["replicas"].values())
    assert not any(one["reached"] for one in fleet.status()["replicas"].values())
    assert fleet.ask() == "hello there"


def test_answers_carry_the_version_of_other_weights(fleet: Fleet, tmp_path: Any):
    body = {"model": "sim", "prompt": "x"}
    assert "penstock-weights" not in fleet.http.post("/v1/completions", json=body).headers
    assert fleet.post("update_weights", source=str(tmp_path), version="v2")["ok"]
    assert fleet.http.post("/v1/completions", json=body).headers["penstock-weights"] == "v2"


def test_other_weights_go_from_one_replica_to_the_next(fleet: Fleet, tmp_path: Path):
    ready = []
    with ThreadPoolExecutor() as pool:
        updated = pool.submit(fleet.post, "update_weights", source=str(tmp_path), version="v3")
        while not updated.done():
            ready.append(fleet.http.get("/health").json()["models"]["sim"]["ready"])
    assert [one["result"] for one in updated.result()["replicas"].values()] == ["ready", "ready"]
    assert [one["weights"] for one in fleet.status()["replicas"].values()] == ["v3", "v3"]
    assert set(ready) == {1, 2}  # never 0: there was always one to ask


def test_weights_go_on_when_the_replica_that_reads_them_dies(fleet: Fleet, tmp_path: Path):
    pids = fleet.pids()
    with ThreadPoolExecutor() as pool:
        updated = pool.submit(fleet.post, "update_weights", source=str(tmp_path), version="v4")
        (reads,) = until(fleet.resting)
        os.kill(pids.pop(reads), signal.SIGKILL)
    (other,) = pids
    outcomes = updated.result()["replicas"]
    assert "is gone" in outcomes[reads]["error"]
    assert outcomes[other] == {"result": "ready"}
    until(lambda: [one["weights"] for one in fleet.status()["replicas"].values()] == ["v4", "v4"])


def test_a_killed_control_remembers(fleet: Fleet):
    fleet.post("pause", mode="wait")
    desired = fleet.status()["desired"]
    title = f"ray::ServeReplica:{APP}:LLMControl"
    (control,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if " ".join(one.info["cmdline"] or ()).startswith(title)
    ]
    control.kill()
    until(lambda: len(answered(fleet).get("replicas", ())) == 2)
    assert fleet.status()["desired"] == desired
    assert fleet.states() == ["paused", "paused"]


def answered(fleet: Fleet) -> dict[str, Any]:
    answer = fleet.http.get("/admin/status")
    return answer.json().get("sim", {}) if answer.status_code == 200 else {}


def test_by_handle(fleet: Fleet):
    done = fleet.control.perform.remote("pause", mode="keep").result(timeout_s=LIMIT_S)
    assert done["ok"]
    assert fleet.servers.broadcast("is_paused").results(timeout_s=LIMIT_S) == [True, True]
    fleet.control.perform.remote("resume", model="sim").result(timeout_s=LIMIT_S)
    fleet.servers.broadcast("sleep", level=2).results(timeout_s=LIMIT_S)
    assert fleet.servers.broadcast("is_sleeping").results(timeout_s=LIMIT_S) == [True, True]
    fleet.servers.broadcast("wakeup").results(timeout_s=LIMIT_S)
    fleet.servers.broadcast("reset_prefix_cache").results(timeout_s=LIMIT_S)
    with pytest.raises(ModelNotFound, match="there are sim"):
        fleet.control.perform.remote("pause", model="other").result(timeout_s=LIMIT_S)
    with pytest.raises(BadRequest, match="no replica 'x'"):
        fleet.control.perform.remote("pause", replica="x").result(timeout_s=LIMIT_S)


def test_from_the_command_line(fleet: Fleet):
    one, other = fleet.status()["replicas"]
    paused = fleet.ctl("pause", "--mode", "wait")
    assert (paused.returncode, paused.stderr) == (0, "")
    assert sorted(paused.stdout.splitlines()) == sorted([f"sim  {one}  paused", f"sim  {other}  paused"])
    assert "desired: paused" in fleet.ctl("status").stdout
    assert fleet.ctl("resume").returncode == 0
    assert fleet.ctl("reset-prefix-cache", "--replica", one).stdout == f"sim  {one}  done\n"
    lacks = fleet.ctl("rpc", "method", "1", 'name="x"')
    assert lacks.returncode == 1
    assert "has no operation 'collective_rpc'" in lacks.stdout
    wrong = fleet.ctl("sleep", "--level", "3")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "level" in wrong.stderr
    strange = fleet.ctl("rpc", "method", "text")
    assert strange.returncode == 2
    assert "no JSON" in strange.stderr


def test_what_is_asked_wrongly_is_refused_with_a_sentence(fleet: Fleet):
    for path, body, said in [
        ("nonsense", {}, "there are sleep, wakeup"),
        ("pause", {"mode": "now"}, "mode"),
        ("pause", {"mood": "keep"}, "It takes mode, clear_cache"),
        ("pause", {"timeout_s": "soon"}, "timeout_s"),
        ("update_weights", {"source": "here", "version": "1"}, "absolute"),
    ]:
        answer = fleet.http.post(f"/admin/{path}", json=body)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert fleet.http.post("/admin/pause", content=b"[]").status_code == 400
    assert fleet.http.get("/admin/pause").status_code == 405
    assert httpx.post(f"{fleet.url}/admin/pause").status_code == 401
