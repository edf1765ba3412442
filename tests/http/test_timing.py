"""Server-Timing: every answer says where its time went, up to its first byte."""

import asyncio
from typing import Any

import httpx
import pytest
from served import Served, chat, until

from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X17")

OURS = ("gateway", "receive", "pick", "queue", "connect", "replica", "failover")
INSIDE = ("front", "engine-queue", "prefill", "decode")


def timing(answer: httpx.Response) -> dict[str, float]:
    """Milliseconds by part; of what has none, its description."""
    (said,) = answer.headers.get_list("server-timing")
    parts: dict[str, float] = {}
    for metric in said.split(", "):
        name, _, value = metric.partition(";")
        parts[name] = float(value.removeprefix("dur=").removeprefix('desc="').removesuffix('"'))
    return parts


def completion(prompt_tokens: int, **more: Any) -> dict[str, Any]:
    """A request whose prompt has so many tokens, each at a millisecond of prefill in these tests."""
    return {"model": "m", "prompt": " ".join("a" * prompt_tokens), **more}


def add_up(parts: dict[str, float]) -> None:
    """What is ours makes up the total; what the replica tells of fits into the time that it took."""
    assert sum(parts.get(name, 0.0) for name in OURS) == pytest.approx(parts["total"], abs=0.01)
    assert sum(parts.get(name, 0.0) for name in INSIDE) <= parts.get("replica", 0.0) + 0.01


@pytest.mark.parametrize("stream", [True, False])
async def test_prefill_and_decode_stand_in_the_proportion_of_the_engines_model(served: Served, stream: bool):
    await served.gateway("m")
    await served.replica(prefill_tokens_per_s=1000, step_base_ms=0, step_per_request_ms=10)
    async with served.http() as http:
        asked = completion(50, max_tokens=6, ignore_eos=True, stream=stream)
        parts = timing(await http.post("/v1/completions", json=asked))
    add_up(parts)
    assert parts["engine-queue"] == 0
    assert parts["prefill"] == 50
    assert parts["decode"] == (0 if stream else 50)


async def one_after_the_other(served: Served) -> tuple[dict[str, float], dict[str, float]]:
    """The times of two requests, of which the second comes while the first is at the replica."""
    (replica,) = served.table.members("m")
    async with served.http() as http:
        first = asyncio.create_task(http.post("/v1/completions", json=completion(1000, max_tokens=1)))
        await until(lambda: replica.in_flight)
        second = await http.post("/v1/completions", json=completion(5, max_tokens=1))
        return timing(await first), timing(second)


async def test_a_turn_in_the_engines_queue_is_told(served: Served):
    await served.gateway("m")
    await served.replica(max_num_seqs=1, prefill_tokens_per_s=1000, step_base_ms=0)
    first, second = await one_after_the_other(served)
    add_up(second)
    assert (first["engine-queue"], first["prefill"]) == (0, 1000)
    assert second["engine-queue"] > 0
    assert "queue" not in second


async def test_a_turn_in_our_own_line_is_told(served: Served):
    await served.gateway(ServedModel("m", created=1, max_ongoing_requests=1))
    await served.replica(prefill_tokens_per_s=1000, step_base_ms=0)
    first, second = await one_after_the_other(served)
    add_up(second)
    assert "queue" not in first
    assert second["queue"] > 0
    assert second["engine-queue"] == 0


async def test_time_lost_at_a_replica_that_failed_is_told(served: Served):
    await served.gateway("m")
    doomed = await served.process("m", prefill_tokens_per_s=1, max_model_len=100)
    async with served.http() as http:
        asked = asyncio.create_task(http.post("/v1/completions", json={"model": "m", "prompt": "a b c d"}))
        (replica,) = served.table.members("m")
        await until(lambda: replica.in_flight)
        await served.replica("m")
        doomed.kill()
        parts = timing(await asked)
    add_up(parts)
    assert parts["attempts"] == 2
    assert parts["failover"] > 0


async def test_a_refusal_tells_what_is_known_by_then(served: Served):
    await served.gateway("m", wait_for_replica_s=0.02)
    async with served.http() as http:
        unknown = timing(await http.get("/nothing"))
        late = timing(await http.post("/v1/completions", json={"model": "m", "prompt": "a"}))
    assert set(unknown) == {"gateway", "total"}
    assert set(late) == {"gateway", "receive", "pick", "queue", "total"}
    add_up(late)
    assert late["queue"] > 10


async def test_an_engines_refusal_tells_of_the_replica(served: Served):
    await served.gateway("m")
    await served.replica(max_model_len=4)
    async with served.http() as http:
        answer = await http.post("/v1/completions", json={"model": "m", "prompt": "a b c d e f g h"})
    assert answer.status_code == 400
    parts = timing(answer)
    add_up(parts)
    assert set(parts) == {"gateway", "receive", "pick", "connect", "replica", "front", "total"}


async def test_an_answer_after_the_deadline_was_spent_at_the_replica(served: Served):
    await served.gateway("m", request_timeout_s=0.2)
    await served.replica(prefill_tokens_per_s=1)
    async with served.http() as http:
        answer = await http.post("/v1/chat/completions", json=chat("a b c d e f g"))
    assert answer.status_code == 504
    parts = timing(answer)
    add_up(parts)
    assert parts["replica"] > parts["total"] / 2


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/metrics"])
async def test_what_the_gateway_says_itself_is_timed_too(served: Served, path: str):
    await served.gateway("m")
    await served.replica()
    async with served.http() as http:
        parts = timing(await http.get(path))
    assert parts["gateway"] == parts["total"]
