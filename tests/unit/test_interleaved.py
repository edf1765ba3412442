"""Rooms whose counts and waits hold though any await of theirs is cancelled, or takes long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from interleaving import CANCELS, DISTURBANCES, Start, disturbed, ended, failing

from penstock.asgi import Message, Receive, Scope, Send
from penstock.config import LLMConfig
from penstock.data.backends.in_process import InProcessEngine
from penstock.data.job.job import Job
from penstock.data.job.report import JobReport
from penstock.data.job.spec import JobSpec
from penstock.data.job.worker import InProcessPool
from penstock.data.journal.lock import acquire_lock
from penstock.engine import Load
from penstock.errors import Overloaded, Unavailable
from penstock.metrics import GatewayMetrics
from penstock.request_context import tier as current_tier
from penstock.serve.fleet.replica import Tried
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.admission import AdmissionQueue
from penstock.serve.gateway.body import Fields
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.dispatch import Dispatch
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.replica.server import LLMServer
from penstock.serve.replica.tiers.controller import Targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare
from penstock.serve.router.router import HandleRouter, LLMRouter
from penstock.serve.routing import RoutingRequest, policy
from penstock.tiers import DEFAULT, FLEX, PRIORITY, Tier
from penstock.transport.address import Address
from penstock.transport.link import Hello, LoadReport


async def admission(start: Start) -> None:
    """Two replicas with a slot each, one for a while. Requests of all classes, one tried before."""
    table = Table("n")
    table.limit("m", 1)
    table.set_members("m", {name: Address(name, "n", None, None, None, "") for name in "ab"})
    first, second = table.members("m")
    model = ServedModel("m", 1, max_ongoing_requests=1, max_queued_requests=3, max_queued_batch=1)
    queue = AdmissionQueue(model, table, policy("power_of_two"), GatewayMetrics().model("m"), 30.0)
    table.watch(lambda _: None, lambda _: None, queue.offer)

    def came(replica: object) -> None:
        table.hello(replica, Hello("m"))
        table.report(replica, LoadReport())

    async def request(tier: Tier, tried: Tried, *, works_s: float) -> str:
        lease = await queue.acquire(RoutingRequest(tokens=9), tried, Timing(), tier=tier)
        try:
            await asyncio.sleep(works_s)
            return lease.replica.id
        finally:
            queue.release(lease)

    failed = Tried()
    failed.add(second)
    came(first)
    tasks = [
        start(request(tier, tried, works_s=2.0))
        for tier, tried in [
            (DEFAULT, Tried()),
            (DEFAULT, failed),
            (FLEX, Tried()),
            (DEFAULT, Tried()),
            (PRIORITY, Tried()),
            (DEFAULT, Tried()),
        ]
    ]
    await asyncio.sleep(1)
    came(second)
    await asyncio.sleep(0.5)
    table.lost(second)
    done, open_ = await asyncio.wait(tasks, timeout=1000)
    assert not open_
    assert len([end for end in map(ended(Overloaded, Unavailable), done) if isinstance(end, str)]) >= 4
    assert (len(queue), table.leases("m")) == (0, 0)
    assert [(one.in_flight, one.sent_tokens, one.batch) for one in (first, second)] == [(0, 0, 0)] * 2
    assert await asyncio.wait_for(request(DEFAULT, Tried(), works_s=0), 1) == "a"


def test_a_slot_is_given_back_wherever_its_request_ends():
    assert disturbed(admission) >= 11


async def classes_in_a_replica(start: Start) -> None:
    """Four batch requests on two seats; online ones come and take them, so that batch runs again."""
    inside: list[Tier] = []

    async def engine(scope: Scope, receive: Receive, send: Send) -> None:
        inside.append(current_tier.get())
        try:
            await asyncio.sleep(0.5)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(0.1)
            await send({"type": "http.response.body", "body": b"x"})
        finally:
            inside.remove(current_tier.get())

    clock = asyncio.get_running_loop().time
    share = BatchShare(lambda: Load(running=len(inside), seats=2), Targets(), clock)
    layer = ByClass(engine, Turns(share))

    async def request(tier: Tier) -> list[Message]:
        current_tier.set(tier)
        body, said = [b"{}"], list[Message]()

        async def receive() -> Message:
            if not body:
                await asyncio.get_running_loop().create_future()  # the client stays
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        async def send(message: Message) -> None:
            said.append(message)

        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await layer(scope, receive, send)
        return said

    tasks = [start(request(FLEX)) for _ in range(4)]
    await asyncio.sleep(0.7)
    tasks += [start(request(DEFAULT)) for _ in range(2)]
    done, open_ = await asyncio.wait(tasks, timeout=5_000)
    assert not open_
    answers = [end for end in map(ended(), done) if not isinstance(end, asyncio.CancelledError)]
    assert len(answers) >= len(tasks) - 1
    assert {len(said) for said in answers} == {2}
    assert (share.running, share.waiting, inside) == (0, 0, [])
    assert len(await asyncio.wait_for(request(FLEX), 60)) == 2
    await asyncio.sleep(1)


def test_a_request_of_either_class_leaves_its_seat_wherever_it_ends():
    assert disturbed(classes_in_a_replica) >= 8


def test_a_job_leaves_its_output_free_wherever_it_is_cancelled(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "one two"}\n{"prompt": "three"}\n')
    outputs = itertools.count()

    async def job(start: Start) -> None:
        model = {"model_id": "m"}
        config = LLMConfig(model_loading_config=model, llm_engine="sim", engine_kwargs={"step_base_ms": 0})
        output = f"{tmp_path}/{next(outputs)}.jsonl"
        spec = JobSpec(inputs=(f"{tmp_path}/in.jsonl",), output=output)

        def run() -> Coroutine[Any, Any, JobReport]:
            return Job(spec, InProcessPool(lambda: InProcessEngine(config))).run()

        task = start(run())
        await asyncio.wait([task], timeout=1000)
        assert task.cancelled() or task.result().ended == "finished"
        acquire_lock(spec.journal).release()
        assert (await run()).ok == 2

    assert disturbed(job, CANCELS) > 10


async def picks_by_a_router_elsewhere(start: Start) -> None:
    """Calls that last as long as the requests that they stand for. The last one is never answered."""
    server, open_calls = object.__new__(LLMServer), list[object]()
    server._id = "r"

    class Call:
        """As Serve returns it."""

        def __init__(self) -> None:
            open_calls.append(self)
            self._replica = server.routed(None)

        async def __anext__(self) -> str:
            await asyncio.sleep(1 if len(open_calls) < 3 else 1000)
            return await anext(self._replica)

        def cancel(self) -> None:
            open_calls.remove(self)

    handle: Any = SimpleNamespace(routed=SimpleNamespace(remote=lambda request: Call()))
    handle.options = lambda **_: handle
    router = HandleRouter(lambda: handle, 30.0)

    async def request() -> str:
        async with router.chosen(Fields(), "s") as replica:
            await asyncio.sleep(60)
            return replica

    tasks = [start(request()) for _ in range(3)]
    _, open_ = await asyncio.wait(tasks, timeout=1000)
    assert not open_
    assert {end for end in map(ended(), tasks) if isinstance(end, str)} <= {"r", ""}
    assert not open_calls
    async with asyncio.timeout(100_000):  # of a gateway that died: nobody cancels it
        assert [replica async for replica in server.routed(None)] == ["r"]


def test_a_call_to_a_router_ends_wherever_its_request_does():
    assert disturbed(picks_by_a_router_elsewhere, (*DISTURBANCES, failing(RuntimeError("bug"), "_ask"))) >= 6


async def waking(start: Start) -> None:
    """Requests for a model without replicas; the first process that is asked to start one never answers."""
    table, asked = Table("n"), list[str]()

    async def is_sleeping() -> None:
        asked.append("")
        await asyncio.sleep(5 if len(asked) > 1 else 1e9)
        table.set_members("m", {"a": Address("a", "n", None, None, None, "")})
        (replica,) = table.members("m")
        table.hello(replica, Hello("m"))
        table.report(replica, LoadReport())

    handle = SimpleNamespace(is_sleeping=SimpleNamespace(remote=is_sleeping))
    router: Any = SimpleNamespace(_table=table, _shifts=SimpleNamespace(handle=lambda model: handle))
    links: Any = None
    dispatch = Dispatch([ServedModel("m", 1)], table, links, "g", 300.0, partial(LLMRouter._wake, router))
    table.watch(lambda _: None, lambda _: None, dispatch.offer)
    queue = dispatch._served["m"].queue

    async def request() -> str:
        lease = await queue.acquire(RoutingRequest(tokens=9), Tried(), Timing())
        queue.release(lease)
        return lease.replica.id

    tasks = [start(request()) for _ in range(3)]
    _, open_ = await asyncio.wait(tasks, timeout=5000)
    assert not open_
    assert sum(end == "a" for end in map(ended(), tasks)) >= 2
    await asyncio.sleep(300)
    assert (len(queue), table.leases("m"), dispatch._waking) == (0, 0, {})


def test_a_model_wakes_though_the_first_call_never_ends_wherever_the_second_one_fails():
    assert (
        disturbed(waking, (*DISTURBANCES, failing(RuntimeError("bug"), "_wake")), also=("_keep_waking",)) >= 6
    )
