"""Streams whose replica fails go on at another one: the client gets exactly the rest."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Replica, Served, chat, until

from penstock.serve.gateway import relay
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.replica.inbound import listener
from penstock.transport import continuation

pytestmark = pytest.mark.parity("X4")

FREE = float("inf")
TEXT = 'Grüße aus Köln, 你好 🙂! Und "so" weiter.'
AT_ONCE = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": FREE, "reply": TEXT}
AT_ONCE |= {"enable_prompt_tokens_details": True}
SSE = [(b"content-type", b"text/event-stream")]
SLOWLY = AT_ONCE | {"step_base_ms": 10}
TOOL = {"name": "look", "parameters": {"properties": {"at": {"const": TEXT}}, "required": ["at"]}}
ASKED = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": ASKED, **USAGE}),
    "two choices": ("/v1/chat/completions", {"messages": ASKED, "n": 2, **USAGE}),
    "stop string": ("/v1/chat/completions", {"messages": ASKED, "stop": "weiter", **USAGE}),
    "tool": (
        "/v1/chat/completions",
        {"messages": ASKED, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    ),
    "completion": ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 12, **USAGE}),
    "response": ("/v1/responses", {"input": "hello"}),
    "message": ("/v1/messages", {"messages": ASKED, "max_tokens": 99}),
    "tool use": (
        "/v1/messages",
        {
            "messages": ASKED,
            "max_tokens": 99,
            "tools": [{"name": "look", "input_schema": TOOL["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "generate": ("/v1/generate", {"prompt": "hello", "sampling_params": {"max_tokens": 99}}),
}


def same(text: str) -> str:
    """Without what differs between two requests; each such thing must be one and the same in an answer."""
    for name in (r'"created(?:_at)?":(\d+)', r'"(?:call_id|id)":"(call_\w+)"'):
        found = set(re.findall(name, text))
        assert len(found) <= 1, found
        for value in found:
            text = text.replace(value, "X")
    return text


async def answer(http: httpx.AsyncClient, kind: str, **more: Any) -> str:
    path, body = KINDS[kind]
    asked = {"model": "m", "stream": True, **body, **more}
    if not asked["stream"]:
        asked.pop("stream_options", None)
    answer = await http.post(path, json=asked, headers=ID)
    assert answer.status_code == 200
    return answer.text


ID = {"x-request-id": "one"}


async def figures(http: httpx.AsyncClient) -> dict[str, float]:
    """Counters of streams that lost their replica, without those of value 0."""
    text = (await http.get("/metrics")).text
    found = re.findall(
        r'^penstock_stream(?:s)?_(\w+)_total\{(?:model="m",?|reason="(.*?)")*\} (.*)$', text, re.M
    )
    return {name + (f" {why}" if why else ""): float(value) for name, why, value in found if float(value)}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_dies_after_any_token_changes_nothing(served: Served, kind: str):
    await served.gateway("m")
    steady = await served.replica(**AT_ONCE)
    async with served.http() as http:
        whole = same(await answer(http, kind))
        made = steady.engine.counts().made_tokens
        served.remove("m", steady.address)
        for tokens in range(1, made + 1):
            doomed = await served.replica(die_after_tokens=tokens, **AT_ONCE)
            asking = asyncio.create_task(answer(http, kind))
            await until(lambda: not served.table.ready("m"))
            served.add("m", steady.address)
            assert same(await asking) == whole, tokens
            for one in (doomed, steady):
                served.remove("m", one.address)
        assert not [reason for reason in await figures(http) if reason.startswith("cut")]
        assert served._gateway._dispatch._records.reserved == served._gateway._bodies.used == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_not_streamed_goes_on_where_its_engine_died(served: Served, kind: str):
    await served.gateway("m")
    steady = await served.replica(**AT_ONCE)
    async with served.http() as http:
        whole = same(await answer(http, kind, stream=False))
        made = steady.engine.counts().made_tokens
        served.remove("m", steady.address)
        for tokens in range(1, made):
            doomed = await served.replica(die_after_tokens=tokens, **AT_ONCE)
            before = steady.engine.counts().made_tokens
            asking = asyncio.create_task(answer(http, kind, stream=False))
            await until(lambda: not served.table.ready("m"))
            served.add("m", steady.address)
            assert same(await asking) == whole, tokens
            spared = made - (steady.engine.counts().made_tokens - before)
            assert spared in (tokens, tokens + 1)  # the last step may have made one for each choice
            for one in (doomed, steady):
                served.remove("m", one.address)
        assert made - (await figures(http))["continued"] in (1, 2)
        assert served._gateway._dispatch._records.reserved == served._gateway._bodies.used == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_not_streamed_goes_on_when_its_replica_is_gone(
    served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(listener, "_HAND_OVER_S", 0.03)
    await served.gateway("m")
    other = await served.replica(**SLOWLY)
    async with served.http() as http:
        whole = same(await answer(http, kind, stream=False))
        made = other.engine.counts().made_tokens
        served.remove("m", other.address)
        first = await served.replica(**SLOWLY)
        asking = asyncio.create_task(answer(http, kind, stream=False))
        await until(lambda: served._gateway._dispatch._records.reserved)
        served.add("m", other.address)
        silent(served, first)
        assert same(await asking) == whole
        found = await figures(http)
        assert 0 < found["tokens_replayed"] == 2 * made - other.engine.counts().made_tokens
        assert found["continued"] == 1
        assert served._gateway._dispatch._records.reserved == served._gateway._bodies.used == 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_answer_that_is_not_streamed_survives_its_process(served: Served, signal_number: int):
    await served.gateway("m")
    doomed = await served.process(**SLOWLY | {"step_base_ms": 80})
    async with served.http() as http:
        asked = {"json": chat("hello"), "headers": ID}
        asking = asyncio.create_task(http.post("/v1/chat/completions", **asked))
        await until(lambda: served._gateway._dispatch._records.reserved)
        os.kill(doomed.process.pid, signal_number)
        await served.replica(**SLOWLY)
        answer = await asking
        whole = await http.post("/v1/chat/completions", **asked)
        assert same(answer.text) == same(whole.text)
        assert (await figures(http))["continued"] == 1
        assert [one.headers.get("x-penstock-continued") for one in (answer, whole)] == ["1", None]
        doomed.kill()


@pytest.mark.parametrize("same_files", [True, False])
async def test_only_an_answer_that_goes_on_says_so(served: Served, tmp_path: Path, same_files: bool):
    await served.gateway(ServedModel("m", created=1, adapter_slots=4))
    doomed = await served.replica(**AT_ONCE, die_after_tokens=6, lora=lora(tmp_path / "one", "{}"))
    async with served.http() as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=chat(model="m:poet")))
        await until(lambda: not served.table.ready("m"))
        served.remove("m", doomed.address)
        where = tmp_path / ("one" if same_files else "two")
        await served.replica(**AT_ONCE, lora=lora(where, "{}" if same_files else '{"r": 8}'))
        answer = await asking
        assert answer.json()["choices"][0]["message"]["content"] == f"[poet@1] {TEXT}"
        assert answer.headers.get("x-penstock-continued") == ("1" if same_files else None)
        assert (await figures(http)).get("continued", 0) == same_files


def lora(folder: Path, config: str) -> dict[str, Any]:
    """A source of one adapter, `poet`."""
    (folder / "poet").mkdir(parents=True, exist_ok=True)
    if not (file := folder / "poet" / "adapter_config.json").exists():
        file.write_text(config)
    return {"dynamic_lora_loading_path": str(folder)}


def carrier_lost(served: Served, replica: Replica) -> None:
    _pool(served, replica).multiplexer._carrier.abort()


def silent(served: Served, replica: Replica) -> None:
    """As after some seconds without a line on the link; the replica goes on to speak."""
    _pool(served, replica).fail("it is silent")


def connection_lost(served: Served, replica: Replica) -> None:
    for connection in _pool(served, replica).multiplexer._streams.values():
        connection.abort()


def _pool(served: Served, replica: Replica) -> Any:
    (known,) = (one for one in served.table if one.id == replica.address.replica_id)
    return served._gateway._links.pool(known)


def dies(served: Served, replica: Replica) -> None:
    replica.engine.die("killed")


Way = Callable[[Served, Replica], None]


async def cut(
    served: Served, http: httpx.AsyncClient, kind: str, *cuts: tuple[int, Way, Any], **more: Any
) -> str:
    """An answer whose replicas fail in these ways, each once so many events have come."""
    (path, body), left = KINDS[kind], list(cuts)
    text = ""
    asked = {"model": "m", "stream": True, **body, **more}
    async with http.stream("POST", path, json=asked, headers=ID) as response:
        async for piece in response.aiter_text():
            text += piece
            if left and text.count("\n\n") >= left[0][0]:
                _, way, replica = left.pop(0)
                way(served, replica)
    assert not left
    return text


async def one_that_dies(served: Served, http: httpx.AsyncClient, **options: Any) -> str:
    """The answer of the only replica, which fails after six events."""
    doomed = await served.replica(**SLOWLY | options)
    return await cut(served, http, "chat", (6, dies, doomed))


def error_of(text: str) -> Any:
    """Of the last event."""
    assert "[DONE]" not in text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
    assert all("choices" in event for event in events[:-1])
    return events[-1]["error"]


@pytest.mark.parametrize("way", [carrier_lost, silent, connection_lost, dies])
async def test_a_stream_goes_on_wherever_its_connection_breaks(served: Served, way: Way):
    await served.gateway("m")
    other = await served.replica(**SLOWLY)
    async with served.http() as http:
        whole = same(await answer(http, "chat"))
        for events in range(1, whole.count("\n\n"), 3):
            served.remove("m", other.address)
            first = await served.replica(**SLOWLY)
            asking = asyncio.create_task(cut(served, http, "chat", (events, way, first)))
            await until(lambda: first.engine.load().running)  # noqa: B023
            served.add("m", other.address)
            assert same(await asking) == whole
            served.remove("m", first.address)
        assert (await figures(http))["continued"] >= 3


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_ends_or_hangs_changes_nothing(served: Served, signal_number: int):
    await served.gateway("m")
    doomed = await served.process(**SLOWLY)
    async with served.http() as http:
        whole = same(await answer(http, "chat"))

        def ends(served: Served, _: object) -> None:
            os.kill(doomed.process.pid, signal_number)

        asking = asyncio.create_task(cut(served, http, "chat", (5, ends, doomed)))
        await until(lambda: served.table.ready("m")[0].in_flight)
        await served.replica(**SLOWLY)
        assert same(await asking) == whole
        doomed.kill()


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP, "engine dies"])
async def test_replicas_that_fail_together_end_nothing(
    served: Served, way: int | str, monkeypatch: pytest.MonkeyPatch
):
    """As when a node is lost: what was begun, computed or just being sent there goes on at the one left."""
    monkeypatch.setattr(relay, "TOGETHER_S", 5.0)  # a full machine takes seconds to end three processes
    await served.gateway("m")
    slowly = SLOWLY | {"step_base_ms": 15, "reply": 4 * TEXT}
    doomed = [await (served.replica if way == "engine dies" else served.process)(**slowly) for _ in range(3)]

    async def whole(http: httpx.AsyncClient, stream: bool) -> bool:
        answer = await http.post("/v1/chat/completions", json=chat(stream=stream))
        return answer.status_code == 200 and (not stream or "[DONE]" in answer.text)

    async with served.http() as http:
        asking = [asyncio.create_task(whole(http, n % 2 == 0)) for n in range(48)]
        await until(lambda: all(one.in_flight >= 4 for one in served.table))
        await until(lambda: served._gateway._dispatch._records.reserved)
        asking += [asyncio.create_task(whole(http, n % 2 == 0)) for n in range(12)]
        await served.replica(**slowly)
        for one in doomed:
            if isinstance(one, Replica):
                one.engine.die("killed")
            else:
                os.kill(one.process.pid, int(way))
        assert all(await asyncio.gather(*asking))
        assert (await figures(http))["continued"] > 0


async def test_the_second_failure_ends_a_stream(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay, "TOGETHER_S", 0.0)
    await served.gateway("m")
    async with served.http() as http:
        doomed = [await served.replica(die_after_tokens=4, **SLOWLY) for _ in range(3)]
        text = await answer(http, "chat")
        assert error_of(text)["code"] == "engine_dead"
        assert await figures(http) == {"continued": 1, "cut deaths": 1, "tokens_replayed": 4}
    assert [one.engine.load().running for one in doomed] == [0, 0, 0]


async def test_without_another_replica_a_stream_ends_after_the_usual_wait(served: Served):
    await served.gateway("m", wait_for_replica_s=0.3)
    async with served.http() as http:
        assert error_of(await one_that_dies(served, http))["code"] == "engine_dead"
        assert await figures(http) == {"cut no replica": 1}


async def test_a_stream_that_has_begun_waits_for_its_own_model_though_a_fallback_is_ready(served: Served):
    m = ServedModel("m", created=1, fallbacks=("other",))
    await served.gateway(m, "other", wait_for_replica_s=60)
    await served.replica("other", reply="no")
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        whole = same(await answer(http, "chat"))
        asking = asyncio.create_task(cut(served, http, "chat", (6, dies, doomed)))
        await until(lambda: doomed.engine.load().running)
        await until(lambda: not served.table.ready("m"))
        await served.replica(**SLOWLY)
        assert same(await asking) == whole


async def test_a_stream_is_not_continued_by_another_version(served: Served):
    await served.gateway("m", wait_for_replica_s=60)
    other = await served.replica(version="w", join=False, **SLOWLY)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        asking = asyncio.create_task(cut(served, http, "chat", (15, dies, doomed)))
        await until(lambda: doomed.engine.load().running)
        served.add("m", other.address)
        await served.until_ready("m", other.address)
        assert error_of(await asking)["code"] == "engine_dead"
        assert await figures(http) == {"cut no replica": 1}
        assert other.engine.counts().finished == 0


async def test_weights_that_change_are_another_version(served: Served, tmp_path: Path):
    await served.gateway("m", wait_for_replica_s=60)
    other = await served.replica(**SLOWLY)
    await other.engine.update_weights(tmp_path, "v2")
    await until(lambda: served.table.ready("m")[0].serves == "v v2")
    served.remove("m", other.address)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        asking = asyncio.create_task(cut(served, http, "chat", (15, dies, doomed)))
        await until(lambda: doomed.engine.load().running)
        served.add("m", other.address)
        await served.until_ready("m", other.address)
        assert error_of(await asking)["code"] == "engine_dead"


@pytest.mark.parametrize("streamed", [True, False])
async def test_what_waited_while_the_weights_changed_is_not_continued_by_the_old_ones(
    served: Served, tmp_path: Path, streamed: bool
):
    await served.gateway("m", wait_for_replica_s=60)
    other = await served.replica(**SLOWLY)
    served.remove("m", other.address)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        await doomed.engine.pause()
        made = asyncio.create_task(
            cut(served, http, "chat", (15, dies, doomed)) if streamed else answer(http, "chat", stream=False)
        )
        await until(lambda: doomed.listener.open_requests)
        await doomed.engine.update_weights(tmp_path, "v2")
        await doomed.engine.resume()
        await until(lambda: doomed.engine.counts().made_tokens)
        served.add("m", other.address)
        await served.until_ready("m", other.address)
        if streamed:
            assert error_of(await made)["code"] == "engine_dead"
        else:
            tokens = doomed.engine.counts().made_tokens
            dies(served, doomed)
            assert "Grüße" in (await made)
            assert other.engine.counts().made_tokens > tokens
        assert "continued" not in await figures(http)


async def test_an_engine_that_would_begin_anew_is_refused(served: Served):
    async def anew(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(40):
            await send({"type": "http.response.start", "status": 200, "headers": SSE})
            await send({"type": "http.response.body", "body": b'data: {"choices":[]}\n\n', "more_body": True})

    await served.gateway("m", wait_for_replica_s=1)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        asking = asyncio.create_task(cut(served, http, "chat", (6, dies, doomed)))
        await until(lambda: doomed.engine.load().running)
        await served.app(anew, version="v")
        text = await asking
        assert error_of(text)["code"] == "engine_dead"
        assert '{"choices":[]}' not in text
        assert await figures(http) == {"cut no replica": 1}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_stream_that_only_busy_replicas_could_continue_ends_after_the_usual_wait(
    served: Served, status: int
):
    """One of them continues it where it can again before."""
    refused: list[int] = []

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        refused.append(status)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    await served.gateway("m", wait_for_replica_s=2)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        asking = asyncio.create_task(cut(served, http, "chat", (6, dies, doomed)))
        await until(lambda: doomed.engine.load().running)
        await served.app(busy, version="v")
        async with asyncio.timeout(30):
            assert error_of(await asking)["code"] == "engine_dead"
        assert await figures(http) == {"cut no replica": 1}
        assert len(refused) > 1


async def test_a_stream_that_is_late_goes_on_at_a_replica_that_was_not_asked_yet(served: Served):
    await served.gateway("m", wait_for_replica_s=0)
    long = {"reply": "word " * 50}
    other = await served.replica(**AT_ONCE | long)

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        served.add("m", other.address)
        await served.until_ready("m", other.address)
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with served.http() as http:
        whole = same(await answer(http, "chat"))
        served.remove("m", other.address)
        doomed = await served.replica(**SLOWLY | long | {"step_base_ms": 30})
        asking = asyncio.create_task(cut(served, http, "chat"))
        await until(lambda: doomed.engine.counts().made_tokens > 5)
        await served.app(busy, version="v")
        dies(served, doomed)
        assert same(await asking) == whole


async def test_records_over_their_limit_are_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(continuation, "_RESERVE_BYTES", 8)
    monkeypatch.setattr(continuation, "_MOST_BYTES", 60)
    await served.gateway("m")
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY)
        text = await cut(served, http, "chat", (14, dies, doomed))
        assert error_of(text)["code"] == "engine_dead"
        assert await figures(http) == {"cut memory": 1}
    assert served._gateway._dispatch._records.reserved == 0


async def test_bodies_of_streams_make_room_for_new_requests(served: Served):
    await served.gateway("m", max_bodies_bytes=3000)
    async with served.http() as http:
        doomed = await served.replica(**SLOWLY | {"reply": 99 * TEXT})
        asking = asyncio.create_task(answer(http, "chat"))
        await until(lambda: served._gateway._bodies.spare)
        large = await http.post("/v1/chat/completions", json=chat("x" * 2900, max_tokens=1))
        assert large.status_code == 200
        doomed.engine.die("killed")
        assert error_of(await asking)["code"] == "engine_dead"
        assert await figures(http) == {"cut memory": 1}


async def test_the_deadline_holds_while_a_stream_waits(served: Served):
    await served.gateway("m", request_timeout_s=1)
    async with served.http() as http:
        assert error_of(await one_that_dies(served, http))["code"] == "deadline_exceeded"
        assert served._gateway._bodies.used == served._gateway._dispatch._records.reserved == 0


async def test_a_client_that_leaves_while_its_stream_waits_leaves_nothing(served: Served):
    gateway = await served.gateway("m")
    doomed = await served.replica(**SLOWLY)
    async with served.http() as http:
        asking = asyncio.create_task(cut(served, http, "chat", (6, dies, doomed)))
        await until(lambda: len(served.line("m")))
        asking.cancel()
        await until(lambda: not len(served.line("m")))
        steady = await served.replica(**SLOWLY)
        await until(lambda: gateway.connections.open == 0)
    assert (gateway._bodies.used, gateway._dispatch._records.reserved, served.table.leases("m")) == (0, 0, 0)
    assert steady.engine.counts().prompt_tokens == 0


async def test_a_client_that_reads_slowly_gets_each_event_once(served: Served):
    await served.gateway("m")
    text = "word " * 3000
    first = await served.replica(**AT_ONCE | {"reply": text})
    async with served.http() as http:
        whole = same(await answer(http, "chat", max_tokens=9000))
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port.number, limit=1024)
    body = json.dumps(chat(stream=True, max_tokens=9000, **KINDS["chat"][1])).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: one\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    pool = _pool(served, first)
    await until(lambda: any(one._held for one in pool.multiplexer._streams.values()))
    await served.replica(**AT_ONCE | {"reply": text})
    dies(served, first)
    raw = b""
    while not raw.endswith(b"\r\n0\r\n\r\n"):
        raw += await reader.read(4096)
    writer.close()
    got = re.sub(rb"\r\n[0-9a-f]+\r\n", b"", raw.partition(b"\r\n\r\n")[2])
    assert same(got.decode()).partition("data: ")[2].rstrip() == whole.partition("data: ")[2].rstrip()


@pytest.mark.parametrize("serve_says_so", [False, True])
async def test_streams_leave_a_replica_that_drains_and_it_waits_for_none(served: Served, serve_says_so: bool):
    await served.gateway("m")
    leaving = await served.replica(**SLOWLY | {"step_base_ms": 20})
    async with served.http() as http:
        long = {"ignore_eos": True, "max_tokens": 200}
        asking = [asyncio.create_task(answer(http, "chat", **long)) for _ in range(8)]
        await until(lambda: leaving.engine.load().running == 8)
        staying = await served.replica(**SLOWLY)
        whole = same(await answer(http, "chat", **long))
        if serve_says_so:
            served.remove("m", leaving.address)
        assert await leaving.listener.drain(60) == 0
        assert staying.engine.load().running == 8
        assert {same(text) for text in await asyncio.gather(*asking)} == {whole}
        found = await figures(http)
        assert found.pop("tokens_replayed") > 8
        assert found == {"continued": 8}
    assert served.table.leases("m") == 0


async def test_a_replica_that_drains_keeps_what_no_other_has_room_for(served: Served):
    await served.gateway(ServedModel("m", created=1, max_ongoing_requests=2))
    leaving, full = [await served.replica(**SLOWLY | {"step_base_ms": 30}) for _ in range(2)]
    async with served.http() as http:
        asking = [asyncio.create_task(answer(http, "chat")) for _ in range(4)]
        await until(lambda: leaving.engine.load().running == full.engine.load().running == 2)
        assert await leaving.listener.drain(60) == 0
        texts = await asyncio.gather(*asking)
        assert all("[DONE]" in text for text in texts)
        assert (await figures(http)).get("continued", 0) <= 2


@pytest.mark.parametrize("same_files", [True, False])
async def test_an_adapter_is_the_same_when_its_files_are(served: Served, tmp_path: Path, same_files: bool):
    await served.gateway(ServedModel("m", created=1, adapter_slots=4), wait_for_replica_s=1)
    doomed = await served.replica(**SLOWLY, lora=lora(tmp_path / "one", "{}"))
    async with served.http() as http:
        whole = same(await answer(http, "chat", model="m:poet"))
        asking = asyncio.create_task(cut(served, http, "chat", (6, dies, doomed), model="m:poet"))
        await until(lambda: doomed.engine.load().running)
        where = tmp_path / ("one" if same_files else "two")
        await served.replica(**SLOWLY, lora=lora(where, "{}" if same_files else '{"r": 8}'))
        text = await asking
        if same_files:
            assert same(text) == whole
        else:
            assert error_of(text)["code"] == "engine_dead"
            assert await figures(http) == {"cut no replica": 1}
