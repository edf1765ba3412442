"""A running service is changed by its file: what restarts, who is refused, what a killed control leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from tests.ports import unused
from tests.ray.command import Command, serving
from tests.waiting import wait_until

KEY = "admin-secret"
TITLE = "ray::ServeReplica:penstock:"


class Service:
    """`penstock serve` of fleet.yaml, and the commands that change it by another file."""

    def __init__(self, command: Command, file: Path, port: int) -> None:
        self.command, self.file = command, file
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(
            base_url=f"{self.url}/admin", headers={"authorization": f"Bearer {KEY}"}, timeout=60
        )

    def run(self, *words: str, code: int = 0) -> str:
        line = [sys.executable, "-m", "penstock.cli", *words, "--url", self.url, "--admin-key", KEY]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def write(self, **models: dict[str, Any]) -> str:
        self.file.write_text(yaml.safe_dump(fleet(**models)))
        return str(self.file)

    def pids(self) -> dict[str, int]:
        """Of replicas, by their deployment. Ray's title of a process ends with the call that it is in."""
        found: dict[str, int] = {}
        for process in self.command.living():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if (line := " ".join(process.cmdline())).startswith(TITLE):
                    found[line.removeprefix(TITLE).split()[0].partition(".")[0]] = process.pid
        return found

    def ask(self, model: str, **more: Any) -> httpx.Response:
        asked = {"model": model, "prompt": "hello", **more}
        return httpx.post(f"{self.url}/v1/completions", json=asked, timeout=60)

    def newest(self) -> dict[str, Any]:
        try:
            return self.http.get("/fleet").raise_for_status().json()
        except httpx.HTTPError:  # control or the gateway restarts
            return {"outcome": "applying"}


def fleet(**models: dict[str, Any]) -> dict[str, Any]:
    named = {"llm_engine": "sim"}
    return {
        "llm_configs": [
            {"model_loading_config": {"model_id": name}, **named, **fields} for name, fields in models.items()
        ]
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    file, port = tmp_path_factory.mktemp("fleet") / "fleet.yaml", unused()
    file.write_text(yaml.safe_dump(fleet(a={}, b={})))
    with serving(str(file), "--port", str(port), "--watch", PENSTOCK_ADMIN_KEY=KEY) as command:
        yield Service(command, file.with_name("next.yaml"), port)


def test_an_apply_keeps_engines_and_a_rollback_takes_it_back(service: Service):
    before = service.pids()
    file = service.write(a={"aliases": ["x"]}, b={})
    assert "a: live" in service.run("plan", file, "--check", code=3)
    assert "Version 2: applied." in service.run("apply", file)
    wait_until(lambda: service.command.said("Version 2 of the fleet, by"), 10)
    assert service.ask("x").json()["model"] == "x"
    assert "Nothing changes." in service.run("apply", file)
    service.run("rollback")
    assert service.ask("x").status_code == 404
    assert service.run("rollback", "1").startswith("Nothing changes.")
    kept = ("LLMServer:a", "LLMServer:b", "LLMControl")
    assert {name: service.pids()[name] for name in kept} == {name: before[name] for name in kept}
    rows = json.loads(service.run("history", "--json"))
    assert [(row["what"], row["outcome"]) for row in rows] == [
        ("rollback to version 1", "applied"),
        ("a live", "applied"),
        ("started", "applied"),
    ]


def test_a_broken_file_changes_nothing(service: Service):
    before = service.pids(), service.newest()
    service.file.write_text("llm_configs: [{llm_engine: sim}]")
    assert "model_loading_config" in service.run("apply", str(service.file), code=2)
    file = service.write(a={"engine_kwargs": {"no_such": 1}}, b={})
    assert "no_such" in service.run("apply", file, code=2)
    file = service.write(a={"lora_config": {"dynamic_lora_loading_path": "./nothere"}}, b={})
    for command in ("plan", "apply"):
        assert "nothere' does not exist on this machine" in service.run(command, file, code=2)
    assert "nothere' does not exist" in service.run("add", "./nothere", code=2)
    service.file.write_text(yaml.safe_dump({**fleet(a={}, b={}), "gateway": {"keys_file": "no-keys.yaml"}}))
    assert "no-keys.yaml" in service.run("apply", file, code=2)
    assert (service.pids(), service.newest()) == before


def test_an_apply_that_a_gateway_cannot_take_over_has_not_been_applied(service: Service):
    keys = service.file.with_name("keys.yaml")
    keys.write_text("keys: [{tenant: t, name: n, key: the-only-key-of-tenant-t}]")
    keyed = {**fleet(a={}, b={}), "gateway": {"keys_file": str(keys)}}
    begun = service.http.put("/fleet", json={"fleet": keyed}).raise_for_status().json()
    text = keys.read_text()
    keys.unlink()  # after it was planned
    wait_until(lambda: service.newest()["outcome"] != "applying", 60)
    newest = service.newest()
    assert newest["version"] == begun["version"]
    assert newest["outcome"].startswith("failed: a gateway stays as it was, and tries again: ")
    assert "keys.yaml: no such file" in newest["outcome"]
    assert service.ask("a").status_code == 200
    keys.write_text(text)
    wait_until(lambda: service.ask("a").status_code == 401, 20)
    assert "applied" in service.run("apply", service.write(a={}, b={}))
    wait_until(lambda: service.ask("a").status_code == 200, 20)


def test_a_file_that_is_watched_is_applied_when_it_is_saved(service: Service):
    version, watched = service.newest()["version"], service.file.with_name("fleet.yaml")
    before = watched.read_text()

    def save(text: str) -> None:
        service.file.write_text(text)
        service.file.rename(watched)  # as editors do

    save("llm_configs: [{llm_engine: sim}]")
    wait_until(lambda: service.command.said("Nothing changes: ", "model_loading_config"), 20)
    assert service.newest()["version"] == version
    save(yaml.safe_dump(fleet(a={"aliases": ["watched"]}, b={})))
    wait_until(lambda: service.newest()["version"] > version, 30)
    wait_until(lambda: service.newest()["outcome"] == "applied", 60)
    assert service.ask("watched").status_code == 200
    save(before)
    wait_until(lambda: service.newest()["version"] > version + 1, 30)
    wait_until(lambda: service.newest()["outcome"] == "applied", 60)
    assert service.ask("watched").status_code == 404


def test_only_the_version_that_is_named_is_changed(service: Service):
    refused = service.http.put("/fleet", json={"fleet": fleet(a={})}, headers={"if-match": '"999"'})
    assert (refused.status_code, refused.json()["error"]["code"]) == (412, "precondition_failed")


def test_killed_control_goes_on_and_others_are_refused_by_name(service: Service):
    before = service.pids()
    slow = fleet(a={}, b={"engine_kwargs": {"start_delay_s": 8.0}})
    begun = service.http.put("/fleet", json={"fleet": slow, "who": "ci"})
    assert begun.status_code == 200, begun.text
    refused = service.http.put("/fleet", json={"fleet": fleet(a={}, b={}), "who": "me"})
    assert refused.status_code == 409
    assert "ci applies version" in refused.json()["error"]["message"]
    psutil.Process(before["LLMControl"]).kill()
    wait_until(lambda: service.newest()["outcome"] == "applied", 90)
    assert service.newest()["version"] == begun.json()["version"]
    after = service.pids()
    assert {name for name in before if after[name] != before[name]} == {"LLMControl", "LLMServer:b"}
    version = service.newest()["version"]
    assert service.http.post("/sleep", json={"model": "a"}).status_code == 200
    assert service.http.post("/wakeup", json={"model": "a"}).status_code == 200
    wakeup, sleep, apply, *_, start = service.http.get("/fleet/audit").json()["data"]
    assert {one["who"] for one in (wakeup, sleep, apply)} == {"the admin key"}
    assert [one["what"] for one in (wakeup, sleep)] == ["wakeup of a", "sleep of a"]
    assert apply["what"].startswith(f"version {version} of the fleet, as ci: ")
    assert start["what"] == "started the fleet"


def test_control_hands_an_apply_over_that_restarts_it(service: Service):
    before = service.pids()
    service.run("apply", service.write(a={}, b={"engine_kwargs": {"start_delay_s": 8.0}}, c={}))
    after = service.pids()
    assert [after[name] for name in ("LLMServer:a", "LLMServer:b")] == [
        before[name] for name in ("LLMServer:a", "LLMServer:b")
    ]
    assert service.ask("c").status_code == 200
    service.run("rollback")
    assert service.ask("c").status_code == 404


def test_a_version_that_cannot_start_is_told_and_the_old_one_answers(service: Service):
    file = service.write(a={"engine_kwargs": {"start_error": "no such weights"}}, b={})
    said = service.run("apply", file, code=1)
    assert "no such weights" in said
    assert ".." not in said
    assert "`penstock rollback`" in said
    assert service.newest()["outcome"].startswith("failed: 'a': ")
    assert service.ask("a").status_code == 200
    assert "is not there: failed" in service.run("plan", file, "--check", code=3)
    file = service.write(a={"engine_kwargs": {"start_error": "no such weights"}}, b={"aliases": ["y"]})
    assert "no such weights" in service.run("apply", file, code=1)
    assert service.ask("y").status_code == 200
    assert service.ask("a").status_code == 200
    service.run("rollback")
    assert service.ask("a").status_code == 200


@pytest.mark.parity("X14", "X27")
def test_adapters_are_changed_where_they_run(service: Service, tmp_path: Path):
    def lora(**adapters: str) -> dict[str, Any]:
        return {"a": {"lora_config": {"adapters": adapters, "pinned": list(adapters)}}, "b": {}}

    def listed() -> set[str]:
        return {one["id"] for one in httpx.get(f"{service.url}/v1/models", timeout=60).json()["data"]}

    one, two, late = (str(tmp_path / name) for name in ("one", "two", "late"))

    def make(folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "adapter_config.json").write_text("{}")

    make(one)
    make(two)
    service.run("apply", service.write(**lora(legal=one)), "--take-over")
    before = service.pids()
    file = service.write(**lora(legal=two, tax=one))
    assert "lora_config.adapters" in service.run("plan", file)
    with ThreadPoolExecutor() as threads:
        stream = threads.submit(service.ask, "a:legal", max_tokens=800, ignore_eos=True, stream=True)
        assert "applied" in service.run("apply", file)
    assert stream.result().text.count('"text"') >= 800
    assert service.ask("a:tax").status_code == 200
    wait_until(lambda: listed() >= {"a:legal", "a:tax"}, 20)
    said = service.run("apply", service.write(**lora(legal=late)), code=1)
    assert (
        f"a replica of 'a' keeps its adapters, and tries again: The adapter 'legal' is not there: '{late}'"
        in said
    )
    assert service.ask("a:tax").status_code == 200
    make(late)
    assert "applied" in service.run("apply", service.write(**lora(legal=late)))
    assert service.ask("a:tax").status_code == 404
    later = str(tmp_path / "later")
    service.run("apply", service.write(**lora(legal=later)), code=1)
    make(later)
    wait_until(lambda: service.newest()["outcome"] == "applied", 60)
    assert service.pids() == before


@pytest.mark.parity("X15")
def test_a_canary_beside_a_model_is_taken_back_and_stays_back(service: Service):
    def shown() -> dict[str, Any]:
        return httpx.get(f"{service.url}/health", timeout=60).json()["models"].get("a@b", {})

    service.run("apply", service.write(a={}, b={}), "--take-over")
    before = service.pids()
    entries = [{"name": "a"}, {"name": "b", "engine_kwargs": {"error_every": 2}}]
    canary = {"versions": entries, "canary": {"version": "b", "steps": [50, 100]}}
    file = service.write(a=canary, b={})
    assert "a@b: added" in service.run("plan", file)
    service.run("apply", file)
    wait_until(lambda: shown()["share"] == 0.5, 30)
    assert service.ask("a@b").status_code in (200, 500)
    while shown()["canary"] == "goes on":
        assert service.ask("a").status_code == 200  # the other version stands in
    assert "taken back from 50 %" in shown()["canary"]
    assert "canary a@b taken back" in json.loads(service.run("history", "--json"))[0]["what"]
    psutil.Process(service.pids()["LLMControl"]).kill()
    wait_until(lambda: service.newest()["outcome"] == "applied", 60)
    service.run("apply", service.write(a={**canary, "aliases": ["y"]}, b={}))
    assert "taken back from 50 %" in shown()["canary"]
    assert {service.ask("y").headers["x-penstock-model"] for _ in range(10)} == {"a"}
    weights = [{"name": "a", "weight": 0}, {"name": "b", "engine_kwargs": {"reply": "bee"}}]
    again = service.write(a={"versions": weights}, b={})
    assert "version.weight: 1.0 -> 0.0  (live)" in service.run("plan", again)
    service.run("apply", again)
    assert shown()["share"] == 1
    assert batch(service.url, "a", 6) == ["bee"] * 6
    after = service.pids()
    assert {name: after[name] for name in before if name != "LLMControl"} == {
        name: pid for name, pid in before.items() if name != "LLMControl"
    }


def test_a_fleet_whose_service_was_killed_comes_back_from_its_storage(tmp_path: Path):
    file, storage = tmp_path / "fleet.yaml", str(tmp_path / "jobs")

    def write(name: str, **a: Any) -> str:
        (tmp_path / name).write_text(yaml.safe_dump({**fleet(a=a), "jobs": {"storage": storage}}))
        return str(tmp_path / name)

    def begun() -> tuple[AbstractContextManager[Command], int]:
        port = unused()
        return serving(write(file.name), "--port", str(port), PENSTOCK_ADMIN_KEY=KEY), port

    command, port = begun()
    with command as lost:
        first = Service(lost, file, port)
        first.run("apply", write("next.yaml", aliases=["x"]))
        for process in lost.living():
            process.kill()
    command, port = begun()
    with command as there:
        second = Service(there, file, port)
        assert second.ask("x").status_code == 404
        assert "a live" in second.run("history", "--from", storage)
        assert "a: live" in second.run("apply", "--from", storage)
        assert second.ask("x").json()["model"] == "x"
        newest = second.newest()
        assert newest["what"].startswith(f"version 2 of {storage}/fleet/penstock-{first.http.base_url.port}-")
        second.run("apply", "1", "--from", storage)
        assert second.ask("x").status_code == 404


def batch(url: str, model: str, count: int) -> list[str]:
    """What the Batches API answers to so many lines."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    body, to = {"model": model, "prompt": "hello"}, {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps({"custom_id": f"{i}", "body": body, **to}) for i in range(count)]
    given = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    made = client.batches.create(input_file_id=given.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: client.batches.retrieve(made.id).status in ("completed", "failed"), 120)
    answers = client.files.content(client.batches.retrieve(made.id).output_file_id).text.splitlines()
    return [json.loads(line)["response"]["body"]["choices"][0]["text"] for line in answers]


@pytest.mark.parity("X27")
def test_a_model_is_added_and_removed_and_the_file_says_so(service: Service, tmp_path: Path):
    service.write(a={}, b={})
    text = f"# Ours.\n{service.file.read_text()}gateway: {{}}  # as it is\n"
    service.file.write_text(text)
    service.run("apply", str(service.file), "--take-over")
    wait_until(lambda: not any("@" in name for name in service.pids()))  # versions of the test before
    before = service.pids()
    (tmp_path / "mine").mkdir()
    said = service.run(
        "add", str(tmp_path / "mine"), "--engine", "sim", "--alias", "z", "--file", str(service.file)
    )
    assert "mine: added" in said
    assert service.ask("z").json()["model"] == "z"
    assert service.file.read_text().startswith("# Ours.\nllm_configs:\n")
    assert "Nothing changes." in service.run("apply", str(service.file))
    service.run("remove", "mine", "--file", str(service.file))
    assert service.ask("z").status_code == 404
    assert service.file.read_text() == text
    wait_until(lambda: service.pids() == before)
    assert "a, b" in service.run("remove", "no-such", "--file", str(service.file), code=2)
    service.write(a={"aliases": ["other"]}, b={})
    assert "beside 'b', too: a" in service.run("remove", "b", "--file", str(service.file), code=2)
