"""Random changes of a fleet that is served meanwhile: what clients may see, which processes may restart."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests.ports import unused
from tests.ray.command import Command, serving
from tests.waiting import wait_until

from penstock.config import LLMServingArgs
from penstock.config.fleet.document import document as kept

ADMIN, KEY = "admin-secret", "the-key-of-all-clients"
TITLE = "ray::ServeReplica:penstock:"
SERVER, VERSION = "LLMServer:", "@b"
MODELS, CLIENTS, CONNECTIONS = 6, 4, 12
WORDS = (4, 60, 400)  # of an answer: up to two seconds

Fleet = dict[str, Any]


class Deployment:
    """Replicas and engine arguments of one."""

    def __init__(self, fields: Mapping[str, Any], version: Mapping[str, Any]) -> None:
        self.replicas = fields.get("deployment_config", {}).get("num_replicas", 1)
        self.engine = {**fields.get("engine_kwargs", {}), **version.get("engine_kwargs", {})}


def document(fleet: Fleet) -> dict[str, Any]:
    """As in the file. The next model stands in for each that cannot answer."""
    following = [*list(fleet["models"])[1:], None]
    models = [
        {"model_loading_config": {"model_id": name}, "llm_engine": "sim", "lora_config": {}, **fields}
        | ({"fallbacks": [next_one]} if next_one else {})
        for (name, fields), next_one in zip(fleet["models"].items(), following, strict=True)
    ]
    return {"llm_configs": models, "gateway": fleet["gateway"]}


def names(fleet: Fleet) -> set[str]:
    """By which clients may ask."""
    models = fleet["models"]
    return {*models, *(alias for fields in models.values() for alias in fields.get("aliases", ()))}


def deployments(fleet: Fleet) -> dict[str, Deployment]:
    return {
        f"{SERVER}{name}{VERSION if 'engine_kwargs' in version else ''}": Deployment(fields, version)
        for name, fields in fleet["models"].items()
        for version in fields.get("versions", [{}])
    }


def restarted(before: Fleet, after: Fleet) -> set[str]:
    """The table of docs/operate/updates.md, for the changes below: models whose engine arguments differ, and
    gateways whose plain key does.
    """
    old, new = deployments(before), deployments(after)
    keys = {fleet["gateway"].get("api_key") for fleet in (before, after)}
    models = {name for name in old.keys() & new.keys() if old[name].engine != new[name].engine}
    return models if len(keys) == 1 else {*models, "LLMRouter"}


def change(kind: str, fleet: Fleet, rng: random.Random, number: int) -> Fleet:
    """The fleet after a change. number: of the change, for values that no other has."""
    after = copy.deepcopy(fleet)
    models, gateway = after["models"], after["gateway"]
    fields = models[name := rng.choice(list(models))]
    match kind:
        case "alias":
            fields["aliases"] = rng.choice([[], [f"x{number}"], [*fields.get("aliases", ()), f"y{number}"]])
        case "limit":
            limits = [fields.setdefault("deployment_config", {}), fields.setdefault("batch", {})]
            rng.choice(limits)["max_queued_requests"] = 50 + number
            gateway["max_body_bytes"] = 10_000 + number
        case "adapters":
            fields["lora_config"] = {"refresh_interval_s": 60.0 + number}
        case "key":
            others = [one for one in gateway["keys"][1:] if rng.random() < 0.5]
            new = {"tenant": "t", "name": f"k{number}", "key": f"another-key-of-the-tests-{number}"}
            gateway["keys"] = [gateway["keys"][0], *others, new]
        case "gateway":
            gateway["api_key"] = f"the-plain-key-{number}"
        case "weight":
            other = {
                "name": "b",
                "weight": rng.choice([0, 1, number]),
                "engine_kwargs": {"step_base_ms": 4.0},
            }
            fields["versions"] = [{"name": "a", "weight": number}, other]
        case "less" if "versions" in fields:
            del fields["versions"]
        case "less" if len(models) > MODELS - 2:
            del models[name]
        case "more" | "less":
            models[f"m{number}"] = {}
        case "replicas":
            now = fields.get("deployment_config", {}).get("num_replicas", 1)
            wanted = rng.choice([n for n in (1, 2, 3) if n != now])
            fields["deployment_config"] = {**fields.get("deployment_config", {}), "num_replicas": wanted}
        case "argument":
            fields["engine_kwargs"] = {"max_num_seqs": 100 + number}
        case _:
            assert kind == "cannot start"
            fields["engine_kwargs"] = {"start_error": "no such weights"}
    return after


LIVE = ("alias", "limit", "adapters", "key", "weight")
ALL = (*LIVE, "more", "less", "replicas", "argument")
SPECIAL = ("faulty", "gateway", "cannot start", "rollback", "twice")
FAULTS: Sequence[dict[str, Any]] = (
    {"engine_kwargs": {"no_such": 1}},
    {"aliases": "x"},
    {"fallbacks": ["no-such"]},
    {"deployment_config": {"num_replicas": -1}},
)


@dataclass(slots=True)
class Load:
    """Clients with one request after the other, streams and plain ones, by names that the fleet has as long
    as the request takes. `failures` has what was not answered in full, but for what a killed gateway cut.
    """

    url: str
    names: set[str]
    killed_at: float = 0.0
    failures: list[str] = field(default_factory=list[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    stop: threading.Event = field(default_factory=threading.Event)

    def client(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {KEY}"}, timeout=180) as http:
            while not self.stop.wait(0.05):
                name, words, begun = rng.choice(sorted(self.names)), rng.choice(WORDS), time.monotonic()
                try:
                    problem = _asked(http, name, words, rng.random() < 0.6)
                except httpx.HTTPError as error:
                    problem = "cut" if self.killed_at > begun - 1 else repr(error)
                is_gone = name not in self.names and problem.startswith(("404", "503"))
                self.ends["gone" if is_gone else problem[:5]] += 1
                if problem not in ("", "cut", "other") and not is_gone:
                    seconds = time.monotonic() - begun
                    self.failures.append(f"{name}, {words} words, {seconds:.1f} s: {problem}")


def _asked(http: httpx.Client, name: str, words: int, stream: bool) -> str:
    """What is wrong with the answer; "other" for one by a fallback."""
    body = {"model": name, "prompt": "on and on", "max_tokens": words, "ignore_eos": True, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    by = answer.headers.get("x-penstock-model", name).partition("@")[0]
    is_alias = name[0] != "m"
    who = "" if is_alias or by == name else "other"
    if not stream:
        return who if answer.json()["usage"]["completion_tokens"] == words else answer.text
    made = answer.text.count('"text"')
    is_whole = answer.text.endswith("data: [DONE]\n\n") and made >= words
    return who if is_whole else f"a stream of {made} words: {answer.text[-300:]}"


@contextmanager
def loaded(url: str, fleet: Fleet) -> Generator[Load]:
    load = Load(url, names(fleet))
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(load.client, seed) for seed in range(CLIENTS)]
        try:
            yield load
        finally:
            load.stop.set()
    assert [one.result() for one in clients] == [None] * CLIENTS


@dataclass(slots=True)
class Changes:
    """Of a service of two gateways. said: what was done, for a failure's reader. fleets: by version. killed:
    deployments of which the newest change has killed a process.
    """

    command: Command
    url: str
    load: Load
    rng: random.Random
    now: Fleet
    fleets: dict[int, Fleet]
    said: list[str] = field(default_factory=list[str])
    killed: set[str] = field(default_factory=set[str])

    def step(self, number: int, kind: str, victims: str) -> None:
        """One change, about the time of which processes are killed. victims: beginnings of deployments."""
        self.said.append(f"{number} {kind} {victims}")
        self.killed.clear()
        before, now = self.processes(), self.now
        if kind == "faulty":
            broken = document(now)
            self.rng.choice(broken["llm_configs"]).update(self.rng.choice(FAULTS))
            assert self.send("PUT", {"fleet": broken}).status_code == 400
            return self.check(before, [now])
        if kind == "rollback":
            rows = self.get("/admin/fleet/history", ADMIN).json()["data"]
            earlier = [row["version"] for row in rows[1:] if row["outcome"] == "applied"]
            via = [self.fleets[earlier[0] if earlier else rows[0]["version"]]]
        elif kind == "cannot start":
            via = [change(kind, now, self.rng, number), now]
        elif kind == "twice":
            first = change(self.rng.choice(ALL), now, self.rng, number)
            via = [
                first,
                change(self.rng.choice(ALL), self.rng.choice([now, first]), self.rng, number + 1000),
            ]
        else:
            via = [change(kind, now, self.rng, number)]
        self.load.names &= set.intersection(*map(names, via))
        if len(via) > 1:
            self.begin(now, via[0])
        if kind == "cannot start":
            wait_until(lambda: self.newest()["outcome"].startswith("failed"), 240)
            assert "no such weights" in self.newest()["outcome"]
        elif kind == "twice":
            time.sleep(self.rng.uniform(0, 2))
        self.begin([now, *via][-2], via[-1], victims, kind)
        wait_until(lambda: self.newest()["outcome"] != "applying", 240)
        self.now = via[-1]
        self.agrees()
        self.check(before, [now, *via])
        self.load.names |= names(self.now)
        return None

    def begin(self, now: Fleet, after: Fleet, victims: str = "", kind: str = "") -> None:
        """Has it applied, once more if a victim's end left that open and there is no new version. The plan
        says what the table says.
        """
        body = {} if kind == "rollback" else {"fleet": document(after), "take_over": kind == "twice"}
        known = self.newest()["version"]
        killing = threading.Timer(self.rng.uniform(0, 2.5), self.kill, [victims])
        killing.start()
        while True:
            try:
                begun = self.send("PUT" if body else "POST", body, **{"if-match": f'"{known}"'})
            except httpx.HTTPError as error:
                begun = httpx.Response(503, text=repr(error))
            if begun.status_code == 200:
                assert {*begun.json()["plan"]["restarts"]} - {"LLMJobs"} == restarted(now, after)
                break
            assert begun.status_code in ((503, 412) if victims else ()), begun.text
            if wait_until(lambda: self.newest().get("version"), 240) > known:
                break
        killing.join()
        self.fleets[wait_until(lambda: self.newest().get("version"), 240)] = after

    def kill(self, victims: str) -> None:
        """A process of each."""
        for victim in victims.split():
            there = self.processes()
            name = self.rng.choice(sorted(name for name in there if name.startswith(victim)))
            if name == "LLMRouter":
                self.load.killed_at = time.monotonic()
            self.killed.add(name)
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.rng.choice(sorted(there[name]))).kill()

    def check(self, before: Mapping[str, set[int]], via: Sequence[Fleet]) -> None:
        """That the processes are those of the last of `via`, and none restarted without need."""
        first, *between, last = [via[0], *via]
        wanted = {"LLMRouter": 2, "LLMControl": 1}
        wanted |= {name: one.replicas for name, one in deployments(last).items()}
        wait_until(lambda: {name: len(pids) for name, pids in self.processes().items()} == wanted, 180)
        after = self.processes()
        must = restarted(first, last)
        may = {name for one, next_one in pairwise(via) for name in restarted(one, next_one)}
        may |= {name for fleet in between for name in deployments(last) if name not in deployments(fleet)}
        for name in before.keys() & after.keys():
            kept, least = before[name] & after[name], min(len(before[name]), len(after[name]))
            if name in must:
                assert not kept, f"{name} was to restart"
            elif name not in may:
                killed = name in self.killed
                assert least - killed <= len(kept) <= least, f"{name}: {before[name]} -> {after[name]}"
        ready = {name.removeprefix(SERVER): one.replicas for name, one in deployments(last).items()}
        wait_until(lambda: {name: one["ready"] for name, one in self.health().items()} == ready)
        assert not self.load.failures

    def agrees(self) -> None:
        """That every gateway serves what the file says: one of so many connections reaches each."""
        newest, fleet = self.newest(), self.now
        assert newest["outcome"] == "applied", newest
        assert newest["fleet"]["llm_configs"] == kept(LLMServingArgs.parse(document(fleet)))["llm_configs"]
        keys = [one["key"] for one in fleet["gateway"]["keys"]]
        size = fleet["gateway"].get("max_body_bytes", 100_000)
        for key in CONNECTIONS * [keys[-1]]:
            listed = self.get("/v1/models", key).json()["data"]
            assert {one["id"] for one in listed} == names(fleet)
            assert self.get("/v1/models", "a-key-that-no-file-has").status_code == 401
            body = {"model": next(iter(fleet["models"])), "prompt": size * "a"}
            large = httpx.post(f"{self.url}/v1/completions", json=body, headers=_bearer(key))
            assert large.status_code == (413 if size < 100_000 else 400)
        shares = {name: one.get("share") for name, one in self.health().items()}
        for name, fields in fleet["models"].items():
            if versions := fields.get("versions"):
                weights = [one["weight"] for one in versions]
                assert shares[f"{name}@b"] == pytest.approx(weights[1] / sum(weights), abs=1e-3)

    def health(self) -> dict[str, Any]:
        return self.get("/health", KEY).json()["models"]

    def get(self, path: str, key: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=_bearer(key), timeout=180)

    def send(self, method: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        headers |= _bearer(ADMIN)
        path = "/admin/fleet/rollback" if method == "POST" else "/admin/fleet"
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=180)

    def newest(self) -> dict[str, Any]:
        try:
            return self.get("/admin/fleet", ADMIN).raise_for_status().json()
        except httpx.HTTPError:  # control or a gateway was killed
            return {"outcome": "applying"}

    def processes(self) -> dict[str, set[int]]:
        """Of each deployment. Ray's title of a process ends with the call that it is in."""
        found = defaultdict[str, set[int]](set)
        for process in self.command.living():
            if (line := " ".join(process.cmdline())).startswith(TITLE):
                found[line.removeprefix(TITLE).split()[0].partition(".")[0]].add(process.pid)
        return dict(found)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def random_changes(folder: Path, kinds: Sequence[str], victims: Sequence[str], seed: int) -> Counter[str]:
    """Applies one change after the other. Returns how requests ended."""
    rng = random.Random(seed)
    fleet: Fleet = {
        "models": {f"m{n}": {} for n in range(MODELS)},
        "gateway": {
            "processes": 2,
            "keys": [{"tenant": "t", "name": "load", "key": KEY}],
            "wait_for_replica_s": 120.0,  # a start on a busy machine
        },
    }
    for name in ("m0", "m1", "m2"):  # the next one stands in while such a model restarts
        fleet["models"][name] = {"deployment_config": {"max_surge_percent": 0}}
    file, port = folder / "fleet.yaml", unused()
    file.write_text(yaml.safe_dump(document(fleet)))
    url = f"http://127.0.0.1:{port}"
    with (
        serving(str(file), "--port", str(port), PENSTOCK_ADMIN_KEY=ADMIN) as command,
        loaded(url, fleet) as load,
    ):
        changes = Changes(command, url, load, rng, fleet, {1: fleet})
        wait_until(lambda: len(changes.processes().get("LLMRouter", ())) == 2)
        try:
            for number, (kind, victim) in enumerate(zip(kinds, victims, strict=True), 1):
                changes.step(number, kind, victim)
        except BaseException as error:
            error.add_note(f"seed {seed}: {changes.said}; {load.ends}; {load.failures}; {command.err[-20:]}")
            raise
    assert not load.failures
    return load.ends
