"""What belongs to a tenant: its files, batches and stored responses are not there for others. Its usage."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from jobs_served import CHAT, ENDED, JobsServed, line, lines
from served import Served, chat, until
from test_files_forwarded import in_front
from test_kept import Keeper
from test_tenants import ANN, BOB, bearer, key
from typer.testing import CliRunner

from penstock.asgi_client import ask
from penstock.cli.app import app
from penstock.config.schema.jobs import JobsConfig
from penstock.openai.errors import parsed
from penstock.openai.response_items import item_number, new_id
from penstock.serve.control import webhook
from penstock.serve.control.deployment import LLMControl
from penstock.serve.control.link import PATH
from penstock.serve.jobs.deployment import storage_url
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.usage import Settlement, Totals, UsageRow

pytestmark = pytest.mark.parity("X6")

SECRET = "whsec_" + base64.b64encode(b"a secret of the tests").decode()


# -- files and batches


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    while True:
        if (batch := await client.batches.retrieve(batch_id)).status in ENDED:
            return batch
        await asyncio.sleep(0.05)


async def two(
    served: Served, jobs: JobsServed, **of_bob: Any
) -> tuple[openai.AsyncOpenAI, openai.AsyncOpenAI]:
    """Clients of two tenants; rows come with the single key."""
    await in_front(served, jobs, api_key="the-key", keys=[key(ANN, "ann"), key(BOB, "bob", **of_bob)])
    return served.openai(ANN), served.openai(BOB)


async def submitted(client: openai.AsyncOpenAI, *rows: str) -> Any:
    content = io.BytesIO(lines(rows))
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


async def test_files_and_batches_are_their_tenants_alone(served: Served, jobs: JobsServed):
    ann, bob = await two(served, jobs)
    batch = await ended(ann, (await submitted(ann, line("a"), line("b"))).id)
    assert batch.status == "completed"
    assert jobs.counted["ann", "rows"] == 2
    assert jobs.counted["ann", "tokens"] > 4
    files, batches = [batch.input_file_id, batch.output_file_id], [batch.id]
    assert {one.id for one in (await ann.files.list()).data} == set(files)
    assert [one.id for one in (await ann.batches.list()).data] == batches
    assert "ann" not in batch.model_dump_json()
    for other in (bob, served.openai("the-key")):
        assert (await other.files.list()).data == []
        assert (await other.batches.list()).data == []
        for file in files:
            for call in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(file)
            with pytest.raises(openai.NotFoundError):
                await other.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
    rows = served._gateway._tenants.usage.counters._rows
    assert (await ann.files.content(batch.output_file_id)).text.count('"usage"') == 2
    assert all(row.output_tokens == 0 for key, row in rows.items() if key[1] == "ann")  # counted when it ran
    foreign = await bob.files.with_raw_response.list(after=files[0])
    assert foreign.parse().data == []
    await jobs.restart()
    assert (await ann.batches.retrieve(batch.id)).id == batch.id
    await in_front(served, jobs)  # a service from which the keys were taken away
    assert (await served.openai("any").files.list()).data == []
    with pytest.raises(openai.NotFoundError):
        await served.openai("any").batches.retrieve(batch.id)
    assert (await ann.files.delete(files[0])).deleted


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ("tokens_per_minute", "rate_limit_exceeded"),
        ("tokens_per_day", "insufficient_quota"),
        ("tokens_per_month", "insufficient_quota"),
        ("cost_per_month", "insufficient_quota"),
    ],
)
async def test_a_tenant_over_its_budget_still_reaches_what_takes_no_tokens(
    served: Served, jobs: JobsServed, limit: str, code: str
):
    keys = [key(ANN, "ann", limits={"tokens_per_day": 30_000, limit: 5_000, "requests_per_minute": 20})]
    await in_front(served, jobs, api_key="the-key", keys=keys, prices={"m": {"input": 1e6}})
    await served.replica(reply="yes")
    ann, http = served.openai(ANN), served.http(headers=bearer(ANN))
    jobs.budget = 0
    served._gateway._tenants.add_rows("ann", "k", ["m"], UsageRow(1, 29_000))
    batch = await submitted(ann, line("a"))
    while (batch := await ann.batches.retrieve(batch.id)).status not in ENDED:  # noqa: ASYNC110
        await asyncio.sleep(0.5)
    assert (batch.status, batch.request_counts.failed) == ("completed", 1)
    assert "insufficient_quota" in (await ann.files.content(batch.error_file_id)).text
    assert [one.id for one in (await ann.batches.list()).data] == [batch.id]
    with pytest.raises(openai.ConflictError):
        await ann.batches.cancel(batch.id)
    assert (await ann.files.delete(batch.input_file_id)).deleted
    assert (await http.get(f"/v1/responses/{new_id('0' * 16)}")).status_code == 404
    assert (await http.post("/tokenize", json={"model": "m", "prompt": "a"})).status_code == 200
    assert (await http.get("/v1/models")).status_code == 200
    for path in ("/v1/chat/completions", "/v1/audio/transcriptions"):
        refused = await http.post(path, json=chat())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, code)
    codes = [(await http.get("/v1/batches")).status_code for _ in range(15)]
    assert (codes[0], codes[-1]) == (200, 429)  # limits of requests hold
    await http.aclose()


async def test_a_client_cannot_name_an_owner_itself(served: Served, jobs: JobsServed):
    ann, _ = await two(served, jobs)
    batch = await submitted(ann, line("a"))
    async with served.http(
        headers=bearer(BOB) | {"x-penstock-owner": "%7B%22tenant%22%3A%22ann%22%7D"}
    ) as http:
        assert (await http.get(f"/v1/batches/{batch.id}")).status_code == 404
        hop = {"connection": "x-penstock-owner"}
        assert (await http.get(f"/v1/batches/{batch.id}", headers=hop)).status_code == 404


async def test_what_was_stored_before_there_were_tenants_is_the_default_ones(
    served: Served, jobs: JobsServed
):
    batch = await submitted(jobs.openai(), line("a"))
    ann, _ = await two(served, jobs)
    assert (await served.openai("the-key").batches.retrieve(batch.id)).id == batch.id
    with pytest.raises(openai.NotFoundError):
        await ann.batches.retrieve(batch.id)


async def test_a_batch_keeps_to_its_keys_models_and_scopes(served: Served, jobs: JobsServed):
    _, bob = await two(served, jobs, models=["n"], scopes=["files", "batch", "completions"])
    with pytest.raises(openai.PermissionDeniedError, match="lacks the scope 'chat'"):
        await submitted(bob, line("a"))
    content = io.BytesIO(lines([line("a", url="/v1/completions", prompt="x")]))
    file = await bob.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await bob.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    failed = await ended(bob, batch.id)
    assert failed.status == "failed"
    assert failed.errors.data[0].code == "model_not_found"


# -- stored responses


async def test_stored_responses_are_their_tenants_alone(served: Served):
    await served.app(Keeper())
    await served.app(Keeper())
    await served.gateway("m", keys=[key(ANN, "ann"), key(BOB, "bob")], api_key="the-key")
    async with served.http() as http:

        async def ask(secret: str, method: str, path: str, **body: Any) -> httpx.Response:
            more = {"json": {"model": "m", **body}} if body else {}
            return await http.request(method, path, headers=bearer(secret), **more)

        for mine, others in ((ANN, (BOB, "the-key")), ("the-key", (ANN, BOB))):
            made = (await ask(mine, "POST", "/v1/responses", input="a")).json()["id"]
            path = f"/v1/responses/{made}"
            item = {"type": "item_reference", "id": f"msg_{item_number(made, 0)}"}
            own = await ask(mine, "POST", "/v1/responses", input="b", previous_response_id=made)
            assert (own.status_code, own.json()["text"]) == (200, "ab")
            for other in others:
                for method, where in (
                    ("GET", path),
                    ("POST", f"{path}/cancel"),
                    ("GET", f"{path}/input_items"),
                    ("DELETE", path),
                ):
                    assert (await ask(other, method, where)).status_code == 404
                theirs = (await ask(other, "POST", "/v1/responses", input="c")).json()["id"]
                theirs_item = {"type": "item_reference", "id": f"msg_{item_number(theirs, 0)}"}
                for body in (
                    {"input": "c", "previous_response_id": made},
                    {"input": [item]},
                    {"input": [{"id": item["id"]}]},
                    {"input": [theirs_item, item]},
                    {"input": [item], "previous_response_id": theirs},
                ):
                    refused = await ask(other, "POST", "/v1/responses", **body)
                    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "response_id")
            assert (await ask(mine, "GET", path)).status_code == 200
            assert (await ask(mine, "DELETE", path)).status_code == 200
        foreign = new_id("0" * 16)
        assert (await ask(ANN, "GET", f"/v1/responses/{foreign}")).status_code == 404
        made = (await ask(ANN, "POST", "/v1/responses", input="a")).json()["id"]
    await served.gateway("m")  # the keys were taken away
    async with served.http() as http:
        assert (await http.get(f"/v1/responses/{made}")).status_code == 404


# -- usage


@pytest.fixture
async def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Control as its deployment runs it, without Ray."""
    monkeypatch.setenv("PENSTOCK_USAGE", str(tmp_path / "usage"))
    found = object.__new__(LLMControl)
    await found.open(tmp_path / "desired.sqlite", "app", "node", "127.0.0.1")
    yield found
    await found.close()


async def test_services_at_other_ports_share_no_usage_budget_or_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PENSTOCK_USAGE", raising=False)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    rows = [((int(time.time()) // 3600, "ann", "k", "m", "", "default"), UsageRow(1, 30))]
    spent, audits = list[int](), list[int]()
    for number, port in enumerate((8000, 8077, None, 8000)):
        control = object.__new__(LLMControl)
        await control.open(tmp_path / f"{number}.sqlite", "app", "node", "127.0.0.1", port)
        sent = Settlement(f"gateway {number}", 1, rows, changes=[("ann", f"change {number}")])
        totals = msgspec.convert(await control.settle(**msgspec.to_builtins(sent)), Totals)
        spent.append(totals.tokens["ann"][1])
        audits.append(len((await control.audit())["data"]))
        await control.close()
    assert (spent, audits) == ([30, 30, 30, 60], [1, 1, 1, 2])
    places = {Path(storage_url(JobsConfig(), "app", port)).name for port in (8000, 8077, None)}
    assert {one.stem for one in (tmp_path / "usage").glob("*.sqlite")} == places  # as files and batches


async def test_usage_reaches_control_and_the_command(served: Served, control: Any):
    async def settle(settlement: Settlement) -> Totals:
        plain = json.loads(msgspec.json.encode(msgspec.to_builtins(settlement)))
        return msgspec.convert(json.loads(msgspec.json.encode(await control.settle(**plain))), Totals)

    async def operate(operation: str, arguments: Any) -> Any:
        answer = await ask(control._serve, f"{PATH}/{operation}", msgspec.json.encode(arguments))
        if answer.status != 200:
            raise parsed(answer.body)
        return json.loads(answer.body)

    gateway = await served.gateway(
        "m",
        keys=[key(ANN, "ann"), key(BOB, "bob", name="ci")],
        admin_key="the-admin-key",
        operate=operate,
        settle=settle,
        prices={"m": {"input": 1, "output": 1}},
    )
    await served.replica(reply="yes")
    spent = 0
    async with served.http() as http:
        for secret, times in ((ANN, 2), (BOB, 3)):
            for _ in range(times):
                answer = await http.post("/v1/chat/completions", json=chat(), headers=bearer(secret))
                spent += answer.json()["usage"]["total_tokens"]
        await until(
            lambda: not gateway._tenants.usage.counters._rows and not gateway._tenants.usage.counters._sent
        )
        admin = bearer("the-admin-key")
        found = (await http.get("/admin/usage?by=tenant,key,model", headers=admin)).json()["data"]
        wrong = await http.get("/admin/usage?by=secret", headers=admin)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "by")
        assert (await http.get("/admin/usage?since=long", headers=admin)).status_code == 400
        before = await http.get("/admin/usage?by=hour&until=1h", headers=admin)
        assert before.json()["data"] == []  # of hours that have begun by then
    assert [(one["tenant"], one["key"], one["model"], one["requests"]) for one in found] == [
        ("ann", "k", "m", 2),
        ("bob", "ci", "m", 3),
    ]
    assert sum(one["prompt_tokens"] + one["output_tokens"] for one in found) == spent

    client = openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="x", admin_api_key="the-admin-key", max_retries=0
    ).admin.organization.usage
    now = int(time.time())
    page = await client.completions(start_time=now - 86_400, group_by=["project_id", "api_key_id", "model"])
    results: list[Any] = [result for bucket in page.data for result in bucket.results]
    one, two = results
    assert (one.project_id, one.api_key_id, one.model, one.num_model_requests) == ("ann", "ann/k", "m", 2)
    assert two.input_tokens + two.output_tokens + one.input_tokens + one.output_tokens == spent
    costs = await client.costs(start_time=now - 86_400, project_ids=["bob"], group_by=["line_item"])
    results = [result for bucket in costs.data for result in bucket.results]
    (cost,) = results
    bobs = two.input_tokens + two.output_tokens
    assert (cost.line_item, cost.amount.value, cost.amount.currency) == ("m", bobs / 1e6, None)
    assert not any(one.results for one in (await client.embeddings(start_time=now, bucket_width="1h")).data)
    with pytest.raises(openai.BadRequestError, match="by the hour"):
        await client.completions(start_time=now, bucket_width="1m")

    def show(*words: str) -> str:
        where = ["--url", served.url, "--admin-key", "the-admin-key"]
        shown = CliRunner().invoke(app, ["usage", *words, *where])
        assert shown.exit_code == 0, shown.output
        return shown.stdout

    table = await asyncio.to_thread(show, "--by", "tenant", "--since", "1d")
    assert [line.split()[:2] for line in table.splitlines()] == [
        ["tenant", "requests"],
        ["ann", "2"],
        ["bob", "3"],
    ]
    assert json.loads(await asyncio.to_thread(show, "--by", "tenant", "--json"))[1]["requests"] == 3
    assert (
        (await asyncio.to_thread(show, "--by", "day,model", "--csv")).splitlines()[0].startswith("day,model,")
    )
    async with served.http(headers=bearer(ANN)) as http:
        assert (await http.get(f"/v1/organization/costs?start_time={now}")).status_code == 403


async def test_a_webhook_is_told_of_usage_and_budgets_until_it_has_them(
    served: Served, control: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(webhook, "_EVERY_S", 0.05)
    client = openai.OpenAI(api_key="x", webhook_secret=SECRET)
    control._webhook = webhook.Webhook(SECRET)
    told, answers = list[dict[str, Any]](), iter([500, 302, 410])

    async def receive(request: web.Request) -> web.Response:
        body = await request.read()
        client.webhooks.verify_signature(body, dict(request.headers))
        if (status := next(answers, 204)) == 204:
            told.append(json.loads(body))
            assert told[-1]["id"] == request.headers["webhook-id"]
        return web.Response(status=status)

    async def settle(settlement: Settlement) -> Totals:
        plain = json.loads(msgspec.json.encode(msgspec.to_builtins(settlement)))
        return msgspec.convert(json.loads(msgspec.json.encode(await control.settle(**plain))), Totals)

    def rows() -> dict[str, int]:
        """The newest counts of requests, by tenant."""
        found = [row for one in told if one["type"] == "usage.updated" for row in one["data"]["rows"]]
        assert all(len(row["hour"]) == len("2026-11-28T09:00Z") for row in found)
        return {row["tenant"]: row["requests"] for row in found}

    taking = web.Application()
    taking.router.add_post("/told", receive)
    async with TestServer(taking) as receiver:
        limits = {"ann": {"limits": {"warn_cost_per_month": 1, "cost_per_month": 200}}}
        of = {"keys": [key(ANN, "ann"), key(BOB, "bob")], "prices": {"m": {"output": 1e6}}, "tenants": limits}
        await served.gateway("m", settle=settle, webhook=str(receiver.make_url("/told")), **of)
        await served.replica(reply="yes")
        async with served.http() as http:
            for secret, most, status in ((ANN, 2, 200), (ANN, 199, 429), (BOB, 1, 200)):
                asked = await http.post(
                    "/v1/chat/completions", json=chat(max_tokens=most), headers=bearer(secret)
                )
                assert asked.status_code == status
        await until(lambda: rows() == {"ann": 2, "bob": 1})
        budgets = {one["type"]: one["data"] for one in told if one["type"] != "usage.updated"}
        assert set(budgets) == {"budget.soft_line", "budget.used_up"}
        for data in budgets.values():
            assert (data["name"], data["soft"], data["limit"]) == ("ann", 1, 200)
            assert 1 <= data["spent"] < 200
        before = len(told)
        await control.close()
        await control.open(tmp_path / "desired.sqlite", "app", "node", "127.0.0.1")
        control._webhook = webhook.Webhook(SECRET)
        async with served.http(headers=bearer(BOB)) as http:
            await http.post("/v1/chat/completions", json=chat())
        await until(lambda: rows() == {"ann": 2, "bob": 2})
        assert {one["type"] for one in told[before:]} == {"usage.updated"}


async def test_a_gateway_goes_on_without_its_store(served: Served):
    asked = []

    async def settle(settlement: Settlement) -> Totals:
        asked.append(settlement)
        raise ConnectionError

    gateway = await served.gateway("m", keys=[key(ANN, "ann")], settle=settle)
    await served.replica(reply="yes")
    async with served.http(headers=bearer(ANN)) as http:
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
    await until(lambda: len(asked) >= 3)
    assert len({one.number for one in asked}) == 1
    assert gateway._tenants.keys.allowances["ann"].gateways == 1


async def test_the_last_counts_are_sent_when_a_gateway_ends(served: Served):
    rows: list[Any] = []

    async def settle(settlement: Settlement) -> Totals:
        rows.extend(row for _, row in settlement.rows)
        return Totals(Periods.at(0.0), {})

    gateway = await served.gateway("m", keys=[key(ANN, "ann")], settle=settle)
    await served.replica(reply="yes")
    async with served.http(headers=bearer(ANN)) as http:
        await http.post("/v1/chat/completions", json=chat())
    await gateway.close()
    assert sum(row.requests for row in rows) == 1
