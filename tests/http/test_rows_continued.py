"""Rows of a batch whose replica dies go on at another one, with the answer that they would have had."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from backend_contract import meaning
from served import NODE, Deployment, Replica, Served, until
from test_adapters_served import folder_of

from penstock.data.backends import serve_lookup
from penstock.data.backends.protocol import Response
from penstock.data.backends.replica import ReplicaClient
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.results.outcome import Outcome
from penstock.data.rows.request import RowRequest, with_fields
from penstock.serve.replica.inbound import listener
from penstock.transport import link, rows
from penstock.transport.pool import connect

pytestmark = pytest.mark.parity("X4")

CHAT = "/v1/chat/completions"
REPLY = "word " * 40
TOKENS = 81  # of it
TOOL = {"name": "look", "parameters": {"properties": {"at": {"const": REPLY}}, "required": ["at"]}}
SLOWLY: dict[str, Any] = {"step_base_ms": 5.0, "reply": REPLY, "enable_prompt_tokens_details": True}


def row(**fields: Any) -> RowRequest:
    body = {"messages": [{"role": "user", "content": "hello"}]} | fields
    return RowRequest(path=CHAT, body=json.dumps(body).encode())


class Fleet(Deployment):
    """With the set that asks its `members`."""

    def __init__(self, served: Served, replicas: ReplicaSet) -> None:
        super().__init__()
        self.served, self.set = served, replicas

    async def replica(self, **options: Any) -> Replica:
        return await self.served.replica(join=False, **SLOWLY | options)

    async def begin(self, asked: RowRequest, *members: Any) -> asyncio.Task[Outcome]:
        """The task of a row, in one of these replicas, with some of its tokens kept here."""
        self.members = [*members]
        await self.set.start()
        window = Window(self.set, RetryPolicy(initial_backoff_s=0.01), exclusive=False)
        running = asyncio.create_task(window.run(asked))
        await until(lambda: self.kept or running.done())
        return running

    @property
    def kept(self) -> int:
        """Bytes of tokens, and more."""
        return self.set._records.reserved


@pytest.fixture
async def fleet(served: Served, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    fleet = Fleet(served, ReplicaSet("app"))
    monkeypatch.setattr(serve_lookup, "node_id", lambda: NODE)
    monkeypatch.setattr(serve_lookup, "find_deployment", lambda app, name: fleet)
    monkeypatch.setattr(listener, "_HAND_OVER_S", 0.02)
    yield fleet
    assert fleet.kept == 0
    await fleet.set.stop()


async def whole(replica: Replica, asked: RowRequest) -> Any:
    """What the replica answers without any death."""
    client = ReplicaClient(replica.address, NODE, "other", bool)
    await until(lambda: client.ready)
    model, _, adapter = (asked.model or "m").partition(":")
    named = with_fields(asked.body, {"model": f"{model}:{adapter}" if adapter else model})
    answer = await client.send(asked.path, named, adapter or None)
    await client.close()
    return without_ids(meaning(answer))


def said(outcome: Outcome) -> Any:
    assert outcome.state == "ok", outcome.failure
    return without_ids(meaning(Response(200, bytes(outcome.body))))


def without_ids(answer: tuple[int, Any]) -> str:
    return re.sub(r'"(?:id|call_id)": "\w+"|"created_at": \d+', '"X"', json.dumps(answer))


def spared(replica: Replica) -> int:
    """Tokens of the second of two answers that it did not make."""
    return 2 * TOKENS - replica.engine.counts().made_tokens


KINDS: dict[str, RowRequest] = {
    "chat": row(),
    "two choices": row(n=2),
    "tool": row(tools=[{"type": "function", "function": TOOL}], tool_choice="required"),
    "response": RowRequest(path="/v1/responses", body=b'{"input": "hello"}'),
    "generate": RowRequest(path="/v1/generate", body=b'{"prompt": "hello", "sampling_params": {}}'),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_row_goes_on_where_its_engine_died(fleet: Fleet, kind: str):
    first, other = await fleet.replica(), await fleet.replica()
    expected = await whole(other, KINDS[kind])
    made = other.engine.counts().made_tokens
    running = await fleet.begin(KINDS[kind], first)
    fleet.members = [other]
    first.engine.die("killed")
    outcome = await running
    assert (said(outcome), outcome.deaths) == (expected, 1)
    lost = first.engine.counts().made_tokens + other.engine.counts().made_tokens - 2 * made
    assert 0 <= lost <= 2  # the step that ran


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_row_survives_its_process(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, signal_number: int):
    monkeypatch.setattr(link, "SILENCE_S", 1.5)
    first = await fleet.served.process(join=False, **SLOWLY | {"step_base_ms": 80})
    other = await fleet.replica()
    expected = await whole(other, row())
    running = await fleet.begin(row(), first)
    fleet.members = [other]
    os.kill(first.process.pid, signal_number)
    assert said(await running) == expected
    assert 0 < spared(other) < TOKENS
    first.kill()


async def test_a_row_leaves_a_replica_that_has_no_more_time_to_drain(fleet: Fleet):
    first, other = await fleet.replica(), await fleet.replica()
    expected = await whole(other, row())
    running = await fleet.begin(row(), first)
    fleet.members = [other]
    await first.listener.drain(0.0)
    assert said(await running) == expected
    assert spared(other) > 0


@pytest.mark.parametrize("other", [{"version": "v2"}, {"version": ""}])
async def test_a_row_begins_anew_where_another_version_is(fleet: Fleet, other: dict[str, Any]):
    first, second = await fleet.replica(), await fleet.replica(**other)
    expected = await whole(second, row())
    running = await fleet.begin(row(), first)
    fleet.members = [second]
    first.engine.die("killed")
    assert said(await running) == expected
    assert spared(second) == 0


@pytest.mark.parametrize("same_files", [True, False])
async def test_an_adapter_is_the_same_when_its_files_are(fleet: Fleet, tmp_path: Path, same_files: bool):
    lora = folder_of(tmp_path, "a")
    first, other = await fleet.replica(lora=lora), await fleet.replica(lora=lora)
    asked = RowRequest(path=CHAT, body=row().body, model="m:a")
    if same_files:
        expected = await whole(other, asked)
    else:
        await whole(first, asked)
        (tmp_path / "a" / "adapter_config.json").write_text('{"r": 8}')
        expected = await whole(other, asked)
    made = other.engine.counts().made_tokens
    running = await fleet.begin(asked, first)
    fleet.members = [other]
    first.engine.die("killed")
    assert said(await running) == expected
    assert (other.engine.counts().made_tokens < 2 * made) == same_files


@pytest.mark.parametrize("adds", [True, False], ids=["adds tokens", "adds none"])
async def test_a_row_goes_on_again_if_its_second_replica_has_added_to_it(fleet: Fleet, adds: bool):
    second = await fleet.replica(**{} if adds else {"step_base_ms": 5000})
    first, third = await fleet.replica(), await fleet.replica()
    expected = await whole(third, row())
    running = await fleet.begin(row(), first)
    fleet.members = [second]
    first.engine.die("killed")
    await until(lambda: second.engine.counts().made_tokens > 5 if adds else second.engine.load().running)
    fleet.members = [third]
    second.engine.die("killed")
    outcome = await running
    assert (said(outcome), outcome.deaths) == (expected, 2)
    assert (spared(third) > 5) == adds


async def test_a_row_that_is_given_up_keeps_nothing(fleet: Fleet):
    first = await fleet.replica()
    running = await fleet.begin(row(), first)
    running.cancel()
    await until(lambda: not fleet.kept and not first.engine.load().running)


async def test_a_job_of_an_older_version_gets_responses_alone(fleet: Fleet):
    first = await fleet.replica()
    heard: list[rows.RowResponse] = []
    carrier = await connect(first.address, NODE, bool)
    sender = rows.RowSender(carrier, bool)

    def take(response: rows.RowResponse, waiting: object, record: object) -> None:
        heard.append(response)

    sender._take = take
    await sender.open(first.address.secret, "older")
    sender._push(rows.RowCall(0, CHAT, row(model="m").body))
    sender._waiting[0] = asyncio.get_running_loop().create_future(), None
    await until(lambda: heard)
    assert [one.status for one in heard] == [200]
    sender._waiting.clear()
    sender.close()
