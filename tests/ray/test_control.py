"""What is desired of a model is reached by every replica, also by those that come later."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from openai import APIStatusError
from tests.cluster import session_folder
from tests.ray.front import Front
from tests.ray.zoo import APP, LIMIT_S, SLOW, Zoo, hold
from tests.waiting import wait_until

from penstock.errors import BadRequest, ModelNotFound

pytestmark = pytest.mark.parity("S25")


@pytest.fixture(autouse=True)
def _awake(zoo: Zoo) -> Iterator[None]:
    yield
    zoo.post("wakeup")
    zoo.post("resume")
    zoo.whole()


def test_asleep_it_holds_requests_for_a_while_and_answers_them_when_it_wakes(zoo: Zoo):
    done = zoo.post("sleep", level=1)
    assert done["ok"]
    assert [one["result"] for one in done["replicas"].values()] == ["asleep", "asleep"]
    assert zoo.http.get("/health").status_code == 200
    assert zoo.health() == {"ready": 0, "resting": 2, "replicas": 2, "wanted": 2}
    with pytest.raises(APIStatusError, match="2 asleep") as refused:
        zoo.ask()
    assert refused.value.status_code == 503
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(zoo.ask)
        wait_until(lambda: zoo.waiting() == 1)
        assert zoo.post("wakeup")["ok"]
        assert asked.result() == "hello there"


def test_who_comes_through_serves_proxy_is_told_of_the_faster_way(front: Front):
    assert front.ask()
    logs = (session_folder() / "logs").glob(f"worker-*-{process('front', 'LLMRouter').pid}.err")
    assert any("Requests come through Ray Serve's proxy" in log.read_text(errors="replace") for log in logs)


def process(app: str, deployment: str) -> psutil.Process:
    """The only replica of a deployment."""
    title = f"ray::ServeReplica:{app}:{deployment}"
    processes = psutil.process_iter(["cmdline"])
    (found,) = [one for one in processes if " ".join(one.info["cmdline"] or ()).startswith(title)]
    return found


@pytest.mark.parametrize(("operation", "state"), [("sleep", "asleep"), ("pause", "paused")])
def test_a_replica_that_takes_the_place_of_another_comes_up_as_desired(zoo: Zoo, operation: str, state: str):
    before = zoo.pids()
    zoo.post(operation)
    killed, pid = next(iter(before.items()))
    zoo.kill(killed, pid)
    wait_until(lambda: killed not in zoo.status()["replicas"])
    wait_until(lambda: zoo.states() == [state, state])
    wait_until(lambda: set(zoo.pids()) - set(before))  # handles learn of it after control
    zoo.post("wakeup")
    zoo.post("resume")
    assert zoo.states() == ["ready", "ready"]
    assert zoo.ask() == "hello there"


def test_one_replica_alone_and_the_other_takes_the_requests(zoo: Zoo):
    one, other = zoo.status()["replicas"]
    done = zoo.post("pause", replica=one)
    assert done["replicas"] == {one: {"result": "paused"}}
    assert zoo.states() == ["paused", "ready"]
    assert [zoo.ask() for _ in range(8)] == ["hello there"] * 8
    shown = zoo.status()
    assert shown["desired"]["state"] == "ready"
    assert shown["replicas"][one]["desired"]["state"] == "paused"
    assert shown["replicas"][other]["desired"]["state"] == "ready"
    zoo.post("resume")  # what is said to all goes before
    assert zoo.states() == ["ready", "ready"]


def test_what_no_replica_can_be_is_refused_and_desired_no_longer(zoo: Zoo):
    done = zoo.post("pause", clear_cache=True)
    assert [one["error"] for one in done["replicas"].values()] == ["Its cache stays."] * 2
    (first, *_) = done["replicas"]
    assert not zoo.post("pause", clear_cache=True, replica=first)["ok"]
    wait_until(lambda: zoo.status()["replicas"][first]["reached"])
    status = zoo.status()
    assert [one["desired"]["state"] for one in (status, *status["replicas"].values())] == ["ready"] * 3
    assert not any("error" in one for one in status["replicas"].values())


def test_a_state_that_cannot_be_reached_is_named_and_changes_nothing(zoo: Zoo):
    done = zoo.post("update_weights", source="/no/such/folder", version="v7")
    assert not done["ok"]
    assert all("/no/such/folder" in one["error"] for one in done["replicas"].values())
    assert all(one["weights"] == "default" for one in zoo.status()["replicas"].values())
    assert not any(one["reached"] for one in zoo.status()["replicas"].values())
    assert zoo.ask() == "hello there"


def test_answers_carry_the_version_of_other_weights(zoo: Zoo, tmp_path: Path):
    body = {"model": SLOW, "prompt": "x"}
    assert "penstock-weights" not in zoo.http.post("/v1/completions", json=body).headers
    assert zoo.post("update_weights", source=str(tmp_path), version="v2")["ok"]
    assert zoo.http.post("/v1/completions", json=body).headers["penstock-weights"] == "v2"


@pytest.fixture
def held(zoo: Zoo, tmp_path: Path) -> dict[str, Path]:
    """By replica's id: while the file is there, it goes on reading the weights in `tmp_path`."""
    held = {replica: hold(tmp_path, pid) for replica, pid in zoo.pids().items()}
    for file in held.values():
        file.touch()
    return held


def test_other_weights_go_from_one_replica_to_the_next(zoo: Zoo, tmp_path: Path, held: dict[str, Path]):
    with ThreadPoolExecutor() as pool, released(held):
        updated = pool.submit(zoo.post, "update_weights", source=str(tmp_path), version="v3")
        while held:
            (reads,) = wait_until(lambda: held.keys() & zoo.resting())  # never both
            wait_until(lambda: zoo.health()["ready"] == 1)
            assert zoo.ask() == "hello there"  # there is always one to ask
            held.pop(reads).unlink()
    assert [one["result"] for one in updated.result()["replicas"].values()] == ["ready", "ready"]
    assert [one["weights"] for one in zoo.status()["replicas"].values()] == ["v3", "v3"]


def test_weights_go_on_when_the_replica_that_reads_them_dies(zoo: Zoo, tmp_path: Path, held: dict[str, Path]):
    pids = zoo.pids()
    with ThreadPoolExecutor() as pool, released(held):
        updated = pool.submit(zoo.post, "update_weights", source=str(tmp_path), version="v4")
        (reads,) = wait_until(zoo.resting)
        zoo.kill(reads, pids[reads])
    (other,) = held.keys() - {reads}
    outcomes = updated.result()["replicas"]
    assert "is gone" in outcomes[reads]["error"]
    assert outcomes[other] == {"result": "ready"}
    wait_until(lambda: [one["weights"] for one in zoo.status()["replicas"].values()] == ["v4", "v4"])


@contextmanager
def released(held: dict[str, Path]) -> Iterator[None]:
    """At the end, whatever the test has seen, no replica is kept from its work."""
    try:
        yield
    finally:
        for file in held.values():
            file.unlink(missing_ok=True)


def test_a_killed_control_remembers(zoo: Zoo):
    zoo.post("pause", mode="wait")
    desired = zoo.status()["desired"]
    process(APP, "LLMControl").kill()
    wait_until(lambda: len(zoo.status().get("replicas", ())) == 2)
    assert zoo.status()["desired"] == desired
    assert zoo.states() == ["paused", "paused"]


def test_by_handle(zoo: Zoo):
    done = zoo.control.perform.remote("pause", model=SLOW, mode="keep").result(timeout_s=LIMIT_S)
    assert done["ok"]
    assert zoo.servers.broadcast("is_paused").results(timeout_s=LIMIT_S) == [True, True]
    zoo.control.perform.remote("resume", model=SLOW).result(timeout_s=LIMIT_S)
    zoo.servers.broadcast("sleep", level=2).results(timeout_s=LIMIT_S)
    assert zoo.servers.broadcast("is_sleeping").results(timeout_s=LIMIT_S) == [True, True]
    zoo.servers.broadcast("wakeup").results(timeout_s=LIMIT_S)
    zoo.servers.broadcast("reset_prefix_cache").results(timeout_s=LIMIT_S)
    with pytest.raises(ModelNotFound, match=r"there are .*slow"):
        zoo.control.perform.remote("pause", model="other").result(timeout_s=LIMIT_S)
    with pytest.raises(BadRequest, match="no replica 'x'"):
        zoo.control.perform.remote("pause", model=SLOW, replica="x").result(timeout_s=LIMIT_S)


def test_from_the_command_line(zoo: Zoo):
    one, other = zoo.status()["replicas"]
    paused = zoo.ctl("pause", "--mode", "wait", "--model", SLOW)
    assert (paused.returncode, paused.stderr) == (0, "")
    assert sorted(paused.stdout.splitlines()) == sorted(
        [f"{SLOW}  {one}  paused", f"{SLOW}  {other}  paused"]
    )
    assert "desired: paused" in zoo.ctl("status", "--model", SLOW).stdout
    assert zoo.ctl("resume", "--model", SLOW).returncode == 0
    reset = zoo.ctl("reset-prefix-cache", "--replica", one, "--model", SLOW)
    assert reset.stdout == f"{SLOW}  {one}  done\n"
    lacks = zoo.ctl("rpc", "method", "1", 'name="x"', "--model", SLOW)
    assert lacks.returncode == 1
    assert "has no operation 'collective_rpc'" in lacks.stdout
    wrong = zoo.ctl("sleep", "--level", "3", "--model", SLOW)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "level" in wrong.stderr
    strange = zoo.ctl("rpc", "method", "text")
    assert strange.returncode == 2
    assert "not valid JSON" in strange.stderr
