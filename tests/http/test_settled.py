"""What tenants' requests have reserved is settled or given back once, however they end; in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from interleaving import DISTURBANCES, Start, disturbed, virtually
from served import Replica, Served, chat, until

from penstock.config.schema.tenants import hashed
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.tenancy.usage import UsageRow

pytestmark = pytest.mark.parity("X6")

KINDS = ("whole", "stream", "stream with usage")
OFFSET = 1  # events of a stream before its first token
LAST = 2  # events after its last one


class Asked:
    """One request, with a key of its own: what its client has seen. leave: the client goes."""

    def __init__(self, number: int, kind: str, most: int, model: str = "m") -> None:
        self.tenant, self.key, self.kind, self.most = f"t{number % 3}", f"k{number}", kind, most
        self.said = list[dict[str, Any]]()
        self.left = asyncio.Event()
        options = {"stream_options": {"include_usage": True}} if kind == KINDS[2] else {}
        body = chat(model=model, max_tokens=most, ignore_eos=True, stream=kind != KINDS[0], **options)
        self._body = json.dumps(body).encode()

    @property
    def secret(self) -> str:
        return f"the-secret-of-{self.tenant}-{self.key}"

    async def ask(self, gateway: Gateway) -> None:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self.secret}"}
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
        scope |= {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
        scope |= {"client": ("127.0.0.1", 9), "root_path": "", "http_version": "1.1"}
        messages = [{"type": "http.request", "body": self._body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if not self.left.is_set():
                self.said.append(message)

        await gateway(scope, receive, send)

    @property
    def status(self) -> int | None:
        return self.said[0]["status"] if self.said else None

    def check(self, row: UsageRow) -> str:
        """What was counted is what the client has seen. Returns how the request ended."""
        body = b"".join(one.get("body", b"") for one in self.said[1:]).decode()
        usage = json.loads(body).get("usage") if self.kind == KINDS[0] and self.status == 200 else None
        data = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
        is_whole = usage is not None or data[-1:] == ["[DONE]"]
        counted = row.prompt_tokens, row.output_tokens
        if self.status is not None and self.status != 200:
            assert (*counted, row.requests, row.errors) == (0, 0, 1, 1)
            assert row.refused or self.status != 429
            return str(self.status)
        if is_whole:
            assert (row.output_tokens, row.errors) == (self.most, 0)
            assert row.prompt_tokens > 0
            for one in [usage] if usage else [json.loads(one).get("usage") for one in data[:-1]]:
                assert one is None or (one["prompt_tokens"], one["completion_tokens"]) == counted
            assert any('"usage":{' in one for one in data) is (self.kind == KINDS[2]) or usage
            return self.kind
        if not self.said and not row.output_tokens:
            return "left before an answer"
        if self.kind != KINDS[0]:
            assert len(data) - OFFSET - LAST <= row.output_tokens <= self.most + OFFSET + LAST
        else:
            assert row.output_tokens <= self.most
        return "left" if self.left.is_set() else "cut"


def given(asked: list[Asked], **limits: int) -> dict[str, Any]:
    """The keys, tenants and prices of a gateway for these requests."""
    keys = [{"tenant": one.tenant, "name": one.key, "hash": hashed(one.secret)} for one in asked]
    for key in keys:
        key["limits"] = {"tokens_per_minute": 10_000, "requests_per_minute": 5, "open_requests": 2}
    of_tenant = {
        "tokens_per_day": 1 << 40,
        "tokens_per_month": 1 << 40,
        "tokens_per_minute": 1 << 40,
        "cost_per_month": 1e6,
    }
    tenants = {one.tenant: {"limits": of_tenant | limits} for one in asked}
    prices = {"m": {"input": 1, "output": 5}, "other": {"output": 7}}
    return {"keys": keys, "tenants": tenants, "prices": prices, "request_timeout_s": 600}


class Fleet:
    """A gateway with keys for these requests, and replicas to be had."""

    def __init__(self, asked: list[Asked], **limits: int) -> None:
        self.asked, self.served, self._limits = asked, Served(), limits
        self.rows, self.replicas = dict[str, UsageRow](), list[Replica]()

    async def begin(self, *cards: ServedModel) -> Gateway:
        self.gateway = await self.served.gateway(*cards, **given(self.asked, **self._limits))
        return self.gateway

    async def replica(self, model: str = "m", **options: Any) -> Replica:
        self.replicas.append(await self.served.replica(model, step_base_ms=50, **options))
        return self.replicas[-1]

    async def check(self) -> Counter[str]:
        """Nothing is reserved, and what was counted is the same everywhere. Returns how requests ended."""
        found, tenants = Counter[str](), self.gateway._tenants
        await until(lambda: not any(one.listener.open_requests for one in self.replicas), 1000)
        rows = {key[2]: row for key, row in tenants.usage.counters._rows.items()}
        assert len(rows) == len(tenants.usage.counters._rows)  # one model, hour and class for each
        for one in self.asked:
            found[one.check(rows.get(one.key, UsageRow()))] += 1
        for name, allowance in tenants.keys.allowances.items():
            own = [
                row
                for key, row in rows.items()
                if name in {one.tenant for one in self.asked if one.key == key} or name.endswith(f"/{key}")
            ]
            spent = [row.prompt_tokens + row.output_tokens for row in own]
            minute, now = allowance.tokens, int(asyncio.get_running_loop().time())
            assert allowance.open == 0, name
            assert minute.used == sum(spent) or (now >= 60 and 0 <= minute.used <= sum(spent)), name
            minute.move(now + 60)
            assert (minute.used, minute.counts, minute.open) == (0, {}, 0), name
            for budget in filter(None, (allowance.day, allowance.month)):
                assert budget.unsettled == sum(spent), name
            if allowance.cost is not None:
                cost = sum(row.cost for row in own)
                assert (allowance.costs.open, allowance.cost.unsettled) == (0, cost), name
                assert cost > 0 or not any(row.output_tokens for row in own)
        for replica in self.replicas:
            assert [tags._waiting for tags in replica.listener._tags.values()] == [[], [], []]
        return found


def _card(**more: Any) -> ServedModel:
    return ServedModel("m", created=1, fallbacks=("other",), **more)


def test_what_is_reserved_is_settled_or_given_back_wherever_a_request_ends():
    async def requests(start: Start) -> None:
        fleet = Fleet([Asked(number, kind, 12) for number, kind in enumerate(KINDS)])
        try:
            gateway = await fleet.begin(_card(max_ongoing_requests=2), ServedModel("other", created=1))
            await fleet.replica(die_after_tokens=4)
            asking = [start(one.ask(gateway)) for one in fleet.asked]
            await asyncio.sleep(0.01)
            await fleet.replica()
            await asyncio.wait(asking, timeout=1000)
            for task, one in zip(asking, fleet.asked, strict=True):
                if task.cancelled():
                    one.left.set()
            found = await fleet.check()
            assert found.total() == len(KINDS)
        finally:
            await fleet.served.close()

    assert disturbed(requests, DISTURBANCES) >= 12


def _history(seed: int, found: Counter[str], count: int = 40) -> Callable[[Start], Any]:
    async def history(start: Start) -> None:
        dice = random.Random(seed)
        asked = [
            Asked(number, dice.choice(KINDS), dice.randint(1, 20), dice.choice(("m", "m", "other")))
            for number in range(count)
        ]
        fleet = Fleet(asked, open_requests=dice.choice((3, 100)), requests_per_minute=dice.choice((8, 1000)))
        try:
            cards = _card(max_ongoing_requests=3, max_queued_requests=dice.choice((2, 100)))
            gateway = await fleet.begin(cards, ServedModel("other", created=1, max_ongoing_requests=4))
            for model in ("m", "m", "other"):
                await fleet.replica(model)
            asking = list[asyncio.Task[None]]()
            for one in asked:
                asking.append(start(one.ask(gateway)))
                if dice.random() < 0.2:
                    asyncio.get_running_loop().call_later(dice.uniform(0, 1.5), one.left.set)
                if dice.random() < 0.1:
                    asyncio.get_running_loop().call_later(dice.uniform(0, 1.5), asking[-1].cancel)
                if dice.random() < 0.2:
                    await _disturb(fleet, dice)
                await asyncio.sleep(dice.expovariate(4))
            await asyncio.wait(asking, timeout=1000)
            for task, one in zip(asking, asked, strict=True):
                assert task.cancelled() or task.exception() is None
                if task.cancelled():
                    one.left.set()
            found.update(await fleet.check())
            found["continued"] += int(_total(gateway, "streams_continued"))
            found["failed over"] += int(_total(gateway, "failovers"))
        finally:
            await fleet.served.close()

    return history


def _total(gateway: Gateway, metric: str) -> float:
    counter = getattr(gateway._dispatch.metrics, metric)
    return sum(sample.value for sample in counter.collect()[0].samples if sample.name.endswith("_total"))


async def _disturb(fleet: Fleet, dice: random.Random) -> None:
    """A replica dies or drains, or one comes."""
    alive = [one for one in fleet.replicas if one.listener._refusal is None]
    model = dice.choice(("m", "m", "other"))
    if alive and dice.random() < 0.6:
        gone = dice.choice(alive)
        if dice.random() < 0.5:
            gone.listener.die("killed")
        else:
            gone.listener.links.drain()
            gone.listener.refuse()
    else:
        await fleet.replica(model, **dice.choice(({}, {"die_after_tokens": 30}, {"fail_after_tokens": 5})))


def test_usage_is_what_clients_saw_after_any_history_of_cuts_deaths_and_refusals():
    found = Counter[str]()
    for seed in range(12):
        virtually(_history(seed, found), seed)
    assert min(found[one] for one in (*KINDS, "left", "cut", "429", "503", "continued", "failed over")) > 0
