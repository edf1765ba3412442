"""Dispatch without connections: models that come, change and go, waking, figures, and who is asked next."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.waiting import until

from penstock.errors import ConfigError, EngineDead, NotFound, Unavailable
from penstock.serve.fleet.replica import Replica, Tried
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import dispatch as module
from penstock.serve.gateway import relay
from penstock.serve.gateway.body import BodyBudget, NoRoom, RequestBody
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.relay import OpenStream
from penstock.serve.gateway.request import UpstreamRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.routing import RoutingRequest
from penstock.serve.tenancy.fairness import Charge
from penstock.tiers import DEFAULT, FLEX, Tier
from penstock.transport.address import Address
from penstock.transport.connection import Head
from penstock.transport.continuation import RESUMABLE
from penstock.transport.link import AdapterReport, Hello, LoadReport

M, N = ServedModel("m", 1, max_ongoing_requests=2), ServedModel("n", 1)


class Desk:
    """A dispatch, what it has woken, and the slots that requests were given."""

    def __init__(self, *models: ServedModel, **routers: Any) -> None:
        self.table, self.woken = Table("n"), list[str]()
        self.failures: list[Exception] = []
        self.closed = Counter[str]()
        self.pools = dict[Replica, Replica]()
        """In place of those with connections."""
        links: Any = SimpleNamespace(pool=self.pools.get)
        self.dispatch = Dispatch(models, self.table, links, "g", 30.0, self._wake, routers)

    async def _wake(self, model_id: str) -> None:
        self.woken.append(model_id)
        if self.failures:
            raise self.failures.pop()

    def join(self, name: str, model_id: str = "m", **report: Any) -> Replica:
        known = {replica.id: replica.address for replica in self.table.members(model_id)}
        self.table.set_members(model_id, known | {name: Address(name, "n", None, None, None, "")})
        replica = self.table.members(model_id)[-1]
        self.table.hello(replica, Hello(model_id))
        self.table.report(replica, LoadReport(**report))
        self.pools[replica] = replica
        self.dispatch.offer(replica)
        return replica

    async def ask(self, model_id: str = "m", tier: Tier = DEFAULT) -> asyncio.Task[Any]:
        queue = self.dispatch._served[model_id].queue
        task = asyncio.create_task(queue.acquire(RoutingRequest(), Tried(), Timing(), tier=tier))
        await asyncio.sleep(0)
        return task

    def shown(self, family: str, **labels: str) -> float | None:
        """A sample of a gateway's page, as it is now."""
        connections: Any = SimpleNamespace(waiting=3, open=8, counts=self.closed)
        assert "penstock_connections" in self.dispatch.figures(connections).gauges
        given = ",".join(f'{name}="{value}"' for name, value in labels.items())
        lines = self.dispatch.metrics.text().decode().splitlines()
        found = [line.split()[-1] for line in lines if line.startswith(f"penstock_{family}{{{given}}} ")]
        return float(found[0]) if found else None


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WAKE_AGAIN_S", 0.01)


async def test_a_model_is_woken_again_and_again_while_a_request_waits_for_it():
    desk = Desk(M, N)
    desk.failures = [RuntimeError("no controller")]
    waits = [await desk.ask() for _ in range(3)]
    other = await desk.ask("n")
    assert len(desk.dispatch._waking) == 2
    await until(lambda: Counter(desk.woken)["m"] == 4)
    assert Counter(desk.woken)["n"] >= 3
    desk.join("a")
    assert [(await waiting).replica.id for waiting in waits[:2]] == ["a", "a"]
    await until(lambda: set(desk.dispatch._waking) == {"n"})  # the third waits for room
    count = Counter(desk.woken)["m"]
    other.cancel()
    await until(lambda: not desk.dispatch._waking)
    assert Counter(desk.woken)["m"] == count
    waits[2].cancel()


@pytest.mark.parametrize("end", ["close", "remove", "replace"])
async def test_what_ends_wakes_nothing_any_more(end: str):
    desk, begun, never = Desk(M), asyncio.Event(), asyncio.Event()

    async def hangs(model_id: str) -> None:
        begun.set()
        await never.wait()

    desk.dispatch._wake = hangs
    waits = await desk.ask()
    await begun.wait()
    waking = desk.dispatch._waking["m"]
    desk.dispatch.close() if end == "close" else desk.dispatch.follow([], 30.0, {})
    if end == "replace":  # its successor is woken by a task of its own, which the end of the old one leaves
        desk.dispatch.follow([M], 30.0, {})
        again = await desk.ask()
        task = desk.dispatch._waking["m"]
        await asyncio.wait([waking])
        assert desk.dispatch._waking == {"m": task}
        again.cancel()
        desk.dispatch.close()
    await asyncio.wait([waking])
    assert waking.cancelled()
    assert waits.done() == (end != "close")
    waits.cancel()


async def test_a_removed_model_is_refused_and_shown_no_longer():
    desk = Desk(M, N)
    desk.join("a")
    assert desk.shown("ready_replicas", model="m") == 1
    desk.dispatch._used |= {"m": 0.0, "n": 0.0}
    desk.dispatch.follow([N], 30.0, {})
    assert desk.shown("ready_replicas", model="m") is None
    assert desk.dispatch.idle_s().keys() == {"n"}
    with pytest.raises(Unavailable, match="'m' has just been removed"):
        desk.dispatch._find("m")
    desk.dispatch.follow([], 30.0, {})  # nothing was ever shown of it
    desk.join("b")


async def test_a_policy_stays_with_what_it_has_learned_until_it_is_another_one():
    desk = Desk(M)
    known = desk.dispatch._served["m"]
    desk.dispatch.follow([replace(M, max_queued_requests=3)], 30.0, {})
    assert desk.dispatch._served["m"].policy is known.policy
    with pytest.raises(ConfigError):
        desk.dispatch.follow([replace(M, routing_policy="absent:Policy"), N], 30.0, {})
    assert desk.dispatch._served.keys() == {"m"}
    for change in ({"policy_options": {"match_rate_threshold": 0.5}}, {"routing_policy": "round_robin"}):
        desk.dispatch.follow([replace(M, **change)], 30.0, {})
        assert desk.dispatch._served["m"].policy is not known.policy
        assert desk.dispatch._served["m"].queue is known.queue


async def test_figures_are_of_now_and_count_each_event_once():
    desk = Desk(replace(M, fallbacks=("n",), adapter_slots=4), N)
    report = {"batch_limit": 5, "batch_running": 3, "batch_waiting": 1, "batch_requeued": 7}
    first = desk.join("a", **report)
    desk.join("b", batch_limit=0, batch_running=1)
    desk.join("c", "n")
    desk.join("d", state="asleep")
    desk.closed = Counter(idle=2)
    desk.table.adapters(first, AdapterReport(()))
    desk.table.adapters(first, AdapterReport(("x", "y")))
    held = [await desk.ask() for _ in range(3 + 1)]
    waits = [await desk.ask(), await desk.ask(tier=FLEX)]
    for task in held:
        task.result()
    for _ in range(2):
        shown = {
            "open_requests": 4,
            "queued_requests": 2,
            "batch_queued_requests": 1,
            "batch_limit": 5,
            "batch_requests": 5,
            "batch_requeued_requests": 7,
            "ready_replicas": 2,
            "wanted_replicas": 3,
            "adapters_loaded": 2,
            "adapter_loads_total": 2,
            "failovers_total": 0,
            "streams_continued_total": 0,
        }
        assert {name: desk.shown(name, model="m") for name in shown} == shown
        assert desk.shown("fallbacks_total", model="m", to="n") == 0
        assert [desk.shown("connections", state=state) for state in ("waiting", "active")] == [3, 5]
        assert desk.shown("connections_closed_total", reason="idle") == 2
    assert (desk.shown("adapters_loaded", model="n"), desk.shown("batch_limit", model="n")) == (None, 0)
    desk.table.wanted["m"] = 9
    desk.closed = Counter(idle=5)
    desk.table.adapters(first, AdapterReport(("x", "y", "z")))
    assert desk.shown("connections_closed_total", reason="idle") == 5
    assert (desk.shown("wanted_replicas", model="m"), desk.shown("adapter_loads_total", model="m")) == (9, 3)
    for task in waits:
        task.cancel()


async def test_draining_ends_the_waits_for_a_replica_of_each_model():
    desk = Desk(M, N)
    waits = [await desk.ask("m"), await desk.ask("n")]
    desk.dispatch.drain()
    results = await asyncio.gather(*waits, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 2
    desk.dispatch.close()


class Relay:
    """In place of `relay.ask`: what `then` does with each request, by the name of the replica."""

    def __init__(self) -> None:
        self.heads: list[tuple[str, bytes]] = []
        self.streams: list[OpenStream] = []
        self.then: dict[str, Callable[[OpenStream], object]] = {}

    @property
    def asked(self) -> list[str]:
        return [name for name, _ in self.heads]

    async def ask(self, pool: Any, head: bytes, stream: OpenStream) -> None:
        self.heads.append((pool.id, head))
        self.streams.append(stream)
        self.then.get(pool.id, str)(stream)


@pytest.fixture
def relayed(patched) -> Relay:
    made = Relay()
    patched(relay, "ask", made.ask)
    return made


def failing(error: Exception, event: Callable[[], object] = list) -> Callable[[OpenStream], None]:
    def then(stream: OpenStream) -> None:
        event()
        raise error

    return then


async def answer(desk: Desk, **more: Any) -> ClientResponse:
    """What `desk` answers to a request; afterwards no slot is held."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"model": "m"}'}

    body = RequestBody(BodyBudget(10_000))
    await body.read(receive, None, 10_000)
    await body.look(b"application/json")
    request = UpstreamRequest("id", "POST", b"/x", [(b"host", b"h")], body, **more)
    send: Any = None
    reply = ClientResponse(send, "id", Timing())
    seen = list(desk.table)
    try:
        async with asyncio.timeout(10):
            await desk.dispatch.answer("m", request, reply)
    finally:
        assert [one.in_flight for one in seen] == [0] * len(seen)
        assert not desk.dispatch._streams._at
    reply.more = [(b"body", bytes(body.content))]
    return reply


ELSEWHERE, DIED = relay.ReplicaFailed("reset", worked=False), relay.ReplicaFailed("reset", worked=True)


@pytest.mark.parametrize(("together_s", "replicas"), [(0, "ab"), (0.1, "abd")])
async def test_a_replica_that_fails_leaves_the_request_to_another_one(
    relayed: Relay, together_s: float, replicas: str, monkeypatch: pytest.MonkeyPatch
):
    """Twice; two that fail together count once, but only once."""
    monkeypatch.setattr(relay, "TOGETHER_S", together_s)
    desk = Desk(M)
    for name in replicas:
        desk.join(name)
        relayed.then[name] = failing(DIED)
    desk.pools.pop(desk.join("c"))  # it has just left
    with pytest.raises(EngineDead, match=f"{len(replicas)} replicas failed"):
        await answer(desk, tier=FLEX)
    assert sorted(set(relayed.asked)) == [*replicas]
    failovers = desk.shown("failovers_total", model="m")
    assert failovers is not None
    assert failovers in (len(replicas) - 1, len(replicas))
    assert desk.shown("tier_requests_total", model="m", tier="flex") == 1
    assert 0 <= desk.dispatch.idle_s()["m"] < 60


@pytest.mark.parametrize("state", ["draining", "ended", "gone"])
async def test_a_replica_that_is_stopped_is_no_death(relayed: Relay, state: str):
    desk = Desk(M)
    for name in "abc":
        replica = desk.join(name)

        def stops(replica: Replica = replica) -> None:
            if state == "gone":
                left = {one.id: one.address for one in desk.table.members("m") if one is not replica}
                desk.table.set_members("m", left)
            else:
                desk.table.report(replica, LoadReport(state="draining"))
            if state == "ended":  # before Serve has said that it is stopped
                desk.table.lost(replica)

        relayed.then[name] = failing(DIED, stops)
    desk.dispatch._served["m"].queue.drain()  # it waits for no other one
    with pytest.raises(Unavailable, match="No replica"):
        await answer(desk)
    assert sorted(relayed.asked) == ["a", "b", "c"]


async def test_what_a_replica_keeps_is_asked_of_it_alone_and_lost_with_it(relayed: Relay):
    desk = Desk(replace(M, fallbacks=("n",)), N)
    keeper = desk.join("a")
    desk.join("b")
    desk.join("c", "n")
    await answer(desk, keeper=keeper)
    assert relayed.asked == ["a"]
    relayed.then["a"] = failing(ELSEWHERE, lambda: desk.table.set_members("m", {}))
    with pytest.raises(NotFound, match="the replica that kept it has ended"):
        await answer(desk, keeper=keeper)


async def test_a_request_tells_its_replica_what_it_is(relayed: Relay):
    desk = Desk(M)
    desk.join("a")
    await answer(desk, adapter="x", tenant="mark", tier=FLEX, charge=Charge("t u", 4.0, 10.0))
    [(_, head)] = relayed.heads
    lines = head.decode().split("\r\n")
    said = {line for line in lines if line.startswith("x-penstock")}
    assert said >= {
        f"x-penstock-{one}" for one in ("adapter: x", "tenant: mark", "share: 2.50 t u", "gateway: g")
    }
    assert "content-length: 14" in lines
    await answer(desk)
    assert not [
        name for name in (b"tenant", b"share", b"adapter", b"continue") if name in relayed.heads[1][1]
    ]


@pytest.mark.parametrize("serves", ["v", "other"])
async def test_a_stream_goes_on_where_the_same_is_served(relayed: Relay, serves: str):
    desk = Desk(M)
    first = desk.join("a", serves="v")

    def breaks(stream: OpenStream) -> None:
        desk.table.lost(first)
        desk.join("b", serves=serves)
        stream.reply.status, stream.reply.streaming = 200, True
        stream.record.origin = b"v;a;1;s;"
        stream.record.add(3, 1, b"\x05")
        raise DIED

    relayed.then["a"] = breaks
    if serves == "other":
        with pytest.raises(EngineDead, match="the answer is incomplete"):
            await answer(desk)
        assert desk.shown("streams_cut_total", model="m", reason="no replica") == 1
        return
    await answer(desk)
    lines = relayed.heads[1][1].decode().split("\r\n")
    assert {"x-penstock-continue: 3 1 1 v;a;1;s;", "content-length: 15"} <= set(lines)
    assert desk.shown("failovers_total", model="m") == 0
    assert desk.dispatch._records.reserved == 0


async def test_what_a_model_cannot_answer_now_the_next_one_of_its_chain_does(relayed: Relay):
    desk = Desk(replace(M, fallbacks=("n", "o")), N, ServedModel("o", 1))
    for name, model_id in (("a", "m"), ("c", "o")):
        desk.join(name, model_id)
    seen = list[tuple[bool, str]]()

    def cannot(stream: OpenStream) -> None:
        seen.append((stream.reply.has_fallback, stream.reply.answered_by))
        raise relay.EngineFailed("It has no room.")

    relayed.then["a"] = cannot
    reply = await answer(desk)
    assert (relayed.asked, seen) == (["a", "c"], [(True, "")])
    assert (reply.answered_by, reply.has_fallback, reply.more) == ("o", False, [(b"body", b'{"model":"o"}')])
    for other in "no":
        assert desk.shown("fallbacks_total", model="m", to=other) == 1
    relayed.then["c"] = cannot
    with pytest.raises(relay.EngineFailed):
        await answer(desk)
    assert seen[-1] == (False, "o")
    with pytest.raises(relay.EngineFailed):
        await answer(desk, adapter="x")  # others have no such adapter
    assert relayed.asked[-1] == "a"


@pytest.mark.parametrize("why", ["dead", "memory", "begun"])
async def test_what_another_model_would_not_cure_is_the_answer(relayed: Relay, why: str):
    desk = Desk(replace(M, fallbacks=("n",)), N)
    desk.join("a")
    desk.join("b", "n")
    error = {"dead": EngineDead("x"), "memory": NoRoom("x"), "begun": relay.EngineFailed("x")}[why]

    def fails(stream: OpenStream) -> None:
        if why == "begun":
            stream.reply.status = 200
        raise error

    relayed.then["a"] = fails
    with pytest.raises(type(error)):
        await answer(desk)
    assert relayed.asked == ["a"]


async def test_a_model_that_is_started_on_demand_is_waited_for_although_another_one_could_answer(
    relayed: Relay,
):
    desk = Desk(replace(M, fallbacks=("n",), start_s=60.0), N)
    desk.join("b", "n")
    asking = asyncio.create_task(answer(desk))
    await until(lambda: len(desk.dispatch._served["m"].queue))
    desk.join("a")
    await asking
    assert relayed.asked == ["a"]


async def test_another_router_picks_for_as_long_as_a_request_lasts_where_a_replica_may_answer(relayed: Relay):
    events = list[Any]()

    @asynccontextmanager
    async def choose(fields: Any, session: str) -> AsyncIterator[str]:
        events.append("begun")
        yield "b"
        events.append("ended")

    desk = Desk(replace(M, routing_policy="serve_router", fallbacks=("n",)), N, m=choose)
    desk.join("c", "n")
    await answer(desk)
    assert (events, relayed.asked) == ([], ["c"])  # none is ready
    keeper = desk.join("a")
    desk.join("b")
    relayed.then["b"] = lambda stream: events.append("asked")
    await answer(desk)
    assert (events, relayed.asked) == (["begun", "asked", "ended"], ["c", "b"])
    await answer(desk, keeper=keeper)
    assert (len(events), relayed.asked[-1]) == (3, "a")


async def test_a_stream_that_moves_uses_the_slot_that_was_taken_for_it_or_gives_it_back(relayed: Relay):
    desk = Desk(M)
    first = desk.join("a")

    def moves(stream: OpenStream) -> None:
        desk.join("b")
        stream.tried.add(first)
        stream.lease = desk.dispatch._served["m"].queue.at_once(RoutingRequest(), stream.tried, DEFAULT)

    relayed.then["a"] = lambda stream: (moves(stream), failing(ELSEWHERE)(stream))
    times = (await answer(desk)).timing
    assert (relayed.asked, times.failures) == (["a", "b"], 1)
    assert [part for part, _ in times.laps] == ["gateway", "pick", "failover", "gateway"]
    relayed.then["b"] = moves  # it was answered before it moved
    desk.table.lost(first)
    await answer(desk)


async def test_streams_of_a_replica_that_drains_move_and_no_others(relayed: Relay):
    desk, ended = Desk(M), list[str]()
    first = desk.join("a", serves="v")

    def drains(stream: OpenStream) -> None:
        connection: Any = SimpleNamespace(fail=ended.append)
        stream.connection, stream.record.origin = connection, b"v;a;1;s;"
        stream.reply.status, stream.reply.streaming = 200, True
        desk.join("b", serves="v")
        for state, moved in (("ready", []), ("draining", ["it drains, and the stream moves"])):
            desk.table.report(first, LoadReport(state=state, serves="v"))
            desk.dispatch.offer(first)
            assert ended == moved
        raise ELSEWHERE

    relayed.then["a"] = drains
    await answer(desk)
    assert relayed.asked == ["a", "b"]


class Pool:
    """One connection, and the pool that has it: a stream of two events, of which the second may come as it
    breaks.
    """

    heard, stream_ended, exchanges = True, False, 1

    def __init__(self, *, breaks: bool = False, status: int = 200) -> None:
        self.breaks, self.status, self.requests = breaks, status, list[bytes]()
        self.multiplexer: Any = SimpleNamespace(attach=lambda *_: b"", detach=lambda _: None)
        self.exhausted = False

    async def connect(self) -> "Pool":
        return self

    acquire = connect

    def request(self, *parts: bytes) -> None:
        self.requests.append(b"".join(parts))

    async def head(self) -> Head:
        return Head(self.status, [(b"content-type", b"text/event-stream"), (RESUMABLE, b"v;a;1;s;")])

    async def read(self) -> bytes:
        if len(self.requests) == 1:
            self.requests.append(b"")
            return b"data: 1\n\n"
        if self.breaks:
            raise ConnectionResetError
        self.exhausted = True
        return b"data: 2\n\n"

    def unread(self) -> bytes:
        return b"data: 2\n\n"

    def release(self, connection: object) -> None:
        pass


async def test_a_broken_stream_keeps_its_body_while_its_client_reads_what_has_come():
    desk = Desk(M)
    first, breaks, goes_on = desk.join("a", serves="v"), Pool(breaks=True), Pool()
    desk.pools[first], budget, asked = cast(Any, breaks), BodyBudget(30), list[bool]()
    body, other = RequestBody(budget), RequestBody(budget)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"model": "m"}'}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("body") == b"data: 2\n\n" and not asked:
            asked.append(True)
            with pytest.raises(NoRoom):
                budget.take(20, other)

    await body.read(receive, None, 30)
    request, reply = UpstreamRequest("id", "POST", b"/x", [], body), ClientResponse(send, "id", Timing())
    answering = asyncio.create_task(desk.dispatch.answer("m", request, reply))
    await until(lambda: breaks.requests)
    desk.pools[desk.join("b", serves="v")] = cast(Any, goes_on)
    await asyncio.wait_for(answering, 10)
    assert asked
    assert goes_on.requests[0].endswith(b'{"model": "m"}')


@pytest.mark.parametrize("status", [429, 503])
async def test_replicas_that_cannot_take_a_broken_stream_now_are_no_deaths(
    status: int, monkeypatch: pytest.MonkeyPatch
):
    """As when the deployment of their preprocessor is full: another one, or the same one later, may go on."""
    monkeypatch.setattr(relay, "_NOT_NOW_S", 0.01, raising=False)
    desk = Desk(M)
    first, full, too, goes_on = Pool(breaks=True), Pool(status=status), Pool(status=status), Pool()
    body, said = RequestBody(BodyBudget(30)), list[bytes]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"model": "m"}'}

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message.get("body", b""))

    await body.read(receive, None, 30)
    request, reply = UpstreamRequest("id", "POST", b"/x", [], body), ClientResponse(send, "id", Timing())
    desk.pools[desk.join("a", serves="v")] = cast(Any, first)
    answering = asyncio.create_task(desk.dispatch.answer("m", request, reply))
    for name, pool in (("b", full), ("c", too), ("d", goes_on)):
        await until(lambda: len(desk.dispatch._served["m"].queue) == 1)
        desk.pools[desk.join(name, serves="v")] = cast(Any, pool)
    await asyncio.wait_for(answering, 10)
    assert full.requests
    assert too.requests
    assert b"".join(said) == b"data: 1\n\ndata: 2\n\ndata: 1\n\ndata: 2\n\n"
