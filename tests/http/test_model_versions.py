"""A model in two versions behind a gateway: which one answers, and what a change of weights leaves alone."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served, chat, until

from penstock.config import GatewayConfig, LLMServingArgs
from penstock.serve.control.canary import Canaries
from penstock.serve.control.state import CanaryState
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.usage import Settlement, Totals

pytestmark = pytest.mark.parity("X15")

HEADER = "x-penstock-model"


def cards(a: float = 50, b: float = 50, *, name: str = "m", **more: Any) -> list[ServedModel]:
    entries = [{"name": "a", "weight": a}, {"name": "b", "weight": b, "engine_kwargs": {"reply": "b"}}]
    model = {"model_loading_config": {"model_id": name}, "llm_engine": "sim", "versions": entries, **more}
    return [ServedModel.of(one) for one in LLMServingArgs.parse({"llm_configs": [model]}).llm_configs]


async def answered_by(served: Served, count: int = 1, model: str = "m", **more: Any) -> Counter[str]:
    """The versions, as their texts and the header say it."""
    found = Counter[str]()
    async with served.http() as http:
        for _ in range(count):
            answer = await http.post("/v1/chat/completions", json=chat(model=model, **more))
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            text = answer.json()["choices"][0]["message"]["content"]
            assert answer.headers.get(HEADER, model) == {"a": "m", "b": "m@b"}[text]
            found[text] += 1
    return found


async def start(served: Served, *models: ServedModel, **config: Any) -> None:
    await served.gateway(*models, **config)
    await served.replica("m", reply="a")
    await served.replica("m@b", reply="b")


async def test_requests_for_the_model_are_shared_out_and_a_version_is_asked_by_name(served: Served):
    await start(served, *cards(75, 25, aliases=["x"]))
    for name in ("m", "x"):
        found = await answered_by(served, 100, name)
        assert 5 < found["b"] < 50, found  # 25, give or take five standard deviations
    assert await answered_by(served, 3, "m@b") == {"b": 3}
    assert (await answered_by(served, 3, "m@b"))["b"] == 3
    async with served.http() as http:
        shown = [(one["id"], one["root"]) for one in (await http.get("/v1/models")).json()["data"]]
        assert shown == [("m", "m"), ("x", "m")]
        assert (await http.get("/v1/models/m@b")).json()["id"] == "m@b"
        assert (await http.get("/health")).json()["models"]["m@b"]["share"] == 0.25
        lines = (await http.get("/metrics")).text.splitlines()
        assert 'penstock_version_share{model="m@b"} 0.25' in lines
        assert any(line.startswith('penstock_requests_total{model="m@b",status="200"}') for line in lines)


async def test_weights_change_and_a_version_goes_while_its_stream_ends(served: Served):
    gateway = await served.gateway(*cards(0, 100))
    await served.replica("m", reply="a")
    b = await served.replica("m@b", reply="word " * 60, step_base_ms=20)
    async with served.http() as http:
        stream = asyncio.create_task(http.post("/v1/chat/completions", json=chat(stream=True)))
        await until(lambda: served.table.leases("m@b") == 1)
        await gateway.reconfigure(GatewayConfig(), cards(100, 0), {})
        assert await answered_by(served, 5) == {"a": 5}
        await gateway.reconfigure(GatewayConfig(), cards(100, 0)[:1], {})
        served.remove("m@b", b.address)
        gone = await http.post("/v1/chat/completions", json=chat(model="m@b"))
        assert gone.status_code == 404
        assert (await stream).text.count(" wor") == 59  # as the simulator cuts "word " * 60


async def test_another_version_answers_where_one_cannot(served: Served):
    gateway = await served.gateway(*cards(1, 99), wait_for_replica_s=0.1)
    await served.replica("m", reply="a")
    assert await answered_by(served, 20) == {"a": 20}
    async with served.http() as http:
        alone = {"model": "m@b"}
        assert (await http.post("/v1/chat/completions", json=chat() | alone)).status_code == 503
        await gateway.reconfigure(GatewayConfig(wait_for_replica_s=0.1), cards(0, 1), {})
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 503  # a is parked


@pytest.mark.parametrize(
    ("sticky", "body", "headers"),
    [
        ("user", {"user": "{}"}, {}),
        ("user", {}, {"authorization": "Bearer the-only-key-of-tenant-{}"}),
        ("session", {"prompt_cache_key": "{}"}, {}),
        ("session", {}, {"x-session-id": "{}"}),
    ],
)
async def test_requests_of_one_user_or_session_stay_with_a_version_at_every_gateway(
    served: Served, sticky: str, body: dict[str, str], headers: dict[str, str]
):
    keys = [{"tenant": "t", "name": f"{i}", "key": f"the-only-key-of-tenant-{i}"} for i in range(12)]
    config = {"keys": keys} if "authorization" in headers else {}
    models = cards(50, 50, sticky=sticky)
    await start(served, *models, **config)
    first = served.http()
    await served.gateway(*models, **config)
    found = list[str]()
    async with first, served.http() as second:
        for i in range(12):
            filled = {name: text.format(i) for name, text in body.items()}
            sent = {name: text.format(i) for name, text in headers.items()}
            answers = [
                await http.post("/v1/chat/completions", json=chat(f"{n}", **filled), headers=sent)
                for n, http in enumerate((first, second, first, second))
            ]
            (version,) = {answer.headers[HEADER] for answer in answers}
            found.append(version)
    assert {"m", "m@b"} == set(found)


async def counted(http: httpx.AsyncClient, name: str, label: str) -> dict[str, float]:
    found = re.findall(
        rf'penstock_{name}_total{{.*{label}="(\w+)".*}} (.*)', (await http.get("/metrics")).text
    )
    return {label: float(count) for label, count in found}


async def test_a_shadow_answers_unseen_and_uncharged_and_both_answers_are_written(
    served: Served, tmp_path: Path
):
    file, key = tmp_path / "shadow.jsonl", "the-only-key-of-tenant-t"
    keys = [{"tenant": "t", "name": "n", "key": key, "scopes": ["chat", "completions", "metrics"]}]
    shadow, charged = {"version": "a", "share": 1.0, "answers": str(file)}, list[str]()

    async def settle(settlement: Settlement) -> Totals:
        charged.extend(about[3] for about, row in settlement.rows for _ in range(row.requests))
        return Totals(Periods.at(0.0), {})

    await start(served, *cards(0, 1, shadow=shadow), keys=keys, settle=settle)
    bodies = [{"model": "m", "prompt": "x"}, chat(stream=True), chat(temperature=0)]
    async with served.http(headers={"authorization": f"Bearer {key}"}) as http:
        for body in bodies:
            path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
            fields = {"content-type": "application/json"}
            answer = await http.post(path, content=json.dumps(body, indent=2), headers=fields)
            assert (answer.status_code, answer.headers[HEADER], '"b"' in answer.text) == (200, "m@b", True)
        await until(lambda: file.exists() and file.read_text().count("\n") == len(bodies))
        assert await counted(http, "shadow_requests", "outcome") == {"ok": 3}
        assert await counted(http, "tenant_requests", "tenant") == {"t": 3}
        await until(lambda: charged == ["m@b"] * 3)
        assert (await counted(http, "tenant_tokens", "kind"))["output"] == 3 * 2  # "b", and the end
    for row in map(json.loads, file.read_text().splitlines()):
        row["request"].pop("stream_options", None)  # the gateway's own, to know what to charge
        assert row["request"] in bodies
        assert [(one["version"], one["status"]) for one in row["answers"]] == [("m@b", 200), ("m", 200)]
        assert ['"b"' in row["answers"][0]["text"], '"a"' in row["answers"][1]["text"]] == [True, True]


async def test_a_shadow_that_hangs_holds_nothing_up(served: Served):
    async def hangs(scope, receive, send):
        await receive()
        await receive()  # until the gateway ends the connection

    gateway = await served.gateway(*cards(1, 0, shadow={"version": "b", "share": 1.0}))
    await served.replica("m", reply="a")
    await served.app(hangs, "m@b")
    async with served.http() as http:
        assert (await answered_by(served, 20)) == {"a": 20}
        assert await counted(http, "shadow_requests", "outcome") == {"skipped": 4}
        assert served.table.leases("m@b") == 16
        assert gateway._bodies.used > 0
        await gateway.close()
        assert (served.table.leases("m@b"), gateway._bodies.used) == (0, 0)


class Canaried:
    """Control's part beside a gateway, without a link between them, and clients that ask all the time."""

    def __init__(self, gateway: Gateway, file: Path, served: Served) -> None:
        self.gateway, self.served = gateway, served
        self.canaries = Canaries(sqlite3.connect(file), lambda: None, lambda said: None)
        self.answers: list[tuple[float, int, str]] = []

    @property
    def state(self) -> CanaryState:
        return next(iter(self.canaries.states().values()), CanaryState(-1.0))

    async def control(self) -> None:
        while True:
            self.canaries.hear("g", self.gateway.splits.reports())
            self.canaries.look(time.time())
            self.gateway.splits.hear(self.canaries.states())
            await asyncio.sleep(0.2)

    async def client(self, http: httpx.AsyncClient, **more: Any) -> None:
        while True:
            answer = await http.post("/v1/chat/completions", json=chat(**more))
            version = answer.headers[HEADER]
            self.answers.append((time.monotonic(), answer.status_code, version))

    async def run(self, until_s: float, clients: int, **more: Any) -> float:
        """Returns after how many seconds the canary was taken back, and goes on to `until_s`."""
        async with self.served.http() as http:
            works = [asyncio.create_task(self.control())]
            works += [asyncio.create_task(self.client(http, **more)) for _ in range(clients)]
            begun = time.monotonic()
            await until(lambda: self.state.outcome, 60)
            took = time.monotonic() - begun
            await asyncio.sleep(max(0.0, until_s - took))
            for work in works:
                work.cancel()
            await asyncio.wait(works)
        return took


async def test_a_canary_begins_when_it_has_started_and_its_restart_is_no_failure(
    served: Served, tmp_path: Path
):
    gateway = await served.gateway(*cards(canary={"version": "b", "steps": [50, 100]}), wait_for_replica_s=1)
    await served.replica("m", reply="a")
    run = Canaried(gateway, tmp_path / "db", served)
    control = asyncio.create_task(run.control())
    assert await answered_by(served, 20) == {"a": 20}
    assert run.canaries.states() == {}
    b = await served.replica("m@b", reply="b")
    await until(lambda: run.state.percent == 50 and gateway.splits.shares()["m@b"] == 0.5)
    assert 0 < (await answered_by(served, 30))["b"] < 30
    served.remove("m@b", b.address)
    assert await answered_by(served, 30) == {"a": 30}
    assert (run.state.percent, gateway.splits._counts["m@b"][1]) == (50, 0)
    control.cancel()


@pytest.mark.parametrize(
    ("percent", "bad", "says"),
    [
        (20, {"error_every": 20}, "requests failed"),
        (5, {"step_base_ms": 15}, "times that of the others"),
    ],
    ids=["5 % errors", "3 times slower"],
)
async def test_a_canary_that_does_worse_is_taken_back(
    served: Served, tmp_path: Path, percent: float, bad: dict[str, Any], says: str
):
    """Seconds depend on the machine; what is asserted are requests."""
    canary = {"version": "b", "steps": [percent, 100], "step_s": 600}
    gateway = await served.gateway(*cards(canary=canary))
    good = {"step_base_ms": 5 if "step_base_ms" in bad else 0, "reply": "word " * 2, "max_num_seqs": 64}
    await served.replica("m", **good)
    await served.replica("m@b", **good | bad)
    run = Canaried(gateway, tmp_path / "db", served)
    took = await run.run(10, 16, stream="step_base_ms" in bad)
    picked, failed = gateway.splits._counts["m@b"]
    count = len(run.answers)
    print(f"{bad}: taken back after {took:.1f} s; {picked:g} of {count} asked it, {failed:g} failed there")
    assert says in run.state.outcome
    assert (run.state.percent, gateway.splits.shares()["m@b"]) == (0, 0)
    assert {status for _, status, _ in run.answers} == {200}  # the other version stood in
    assert failed <= 0.02 * count
    assert "error_every" in bad or picked <= 100
    async with served.http() as http:
        assert run.state.outcome == (await http.get("/health")).json()["models"]["m@b"]["canary"]
