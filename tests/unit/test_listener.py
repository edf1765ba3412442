"""A replica's listener as an ASGI app: what it passes on, what it refuses, what it counts."""

import asyncio
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.waiting import until

from penstock import asgi
from penstock.asgi import TRUSTED
from penstock.config import LLMConfig
from penstock.engine import Load
from penstock.errors import Unavailable
from penstock.request_context import (
    ChoiceTokens,
    EventFrame,
    created,
    current_replica,
    id_seed,
    record_tokens,
    shortcut,
    start_tag,
    tier,
    tokens_before,
    tokens_so_far,
    using_adapter,
)
from penstock.serve.http import direct_writer
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.replica.inbound import engine_response
from penstock.serve.replica.inbound.custom_endpoints import CustomEndpoints, endpoint
from penstock.serve.replica.inbound.engine_response import EngineResponse
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.transport import link, multiplexer, rows
from penstock.transport.connection import STREAM, ReplicaConnection
from penstock.transport.continuation import CONTINUE, RESUMABLE, Origin, RecordBudget, StreamRecord, encode

CONTEXT: tuple[ContextVar[Any], ...] = (created, current_replica, id_seed, tier, tokens_before, start_tag)
Field = tuple[bytes, bytes]


class Replica:
    """A listener without connections; its engine notes what it gets, and answers once `go` is set."""

    def __init__(self, **source: Any) -> None:
        self.scopes: list[asgi.Scope] = []
        self.contexts: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.go = asyncio.Event()
        self.go.set()
        facts = {"load": lambda: None, "hello": lambda: link.Hello("m", 100), "version": "v", **source}
        self.listener = Listener(self._engine, StatusSource(**facts), PrivateListener("r", "n", None))

    async def _engine(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        self.scopes.append(scope)
        self.contexts.append({variable.name: variable.get() for variable in CONTEXT})
        self.bodies.append(await asgi.read_body(receive))
        await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def begin(
        self, *fields: Field, path: str = "/x", body: bytes = b"", secret: str = "", **extensions: object
    ) -> Any:
        """The task of a request; its result is the status, the header's fields and the body."""
        said = secret or self.listener.address.secret
        headers = [(link.SECRET, said.encode()), (link.GATEWAY, b"g"), *fields]
        messages, sent = [{"type": "http.request", "body": body}], list[asgi.Message]()

        async def receive() -> asgi.Message:
            return messages.pop() if messages else await asgi.stay()

        async def send(message: asgi.Message) -> None:
            sent.append(message)

        async def ask() -> tuple[int, dict[bytes, bytes], bytes]:
            scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
            await self.listener({**scope, "extensions": extensions}, receive, send)
            start, *bodies = sent or [{"status": 0, "headers": []}]
            return start["status"], dict(start["headers"]), b"".join(each["body"] for each in bodies)

        return asyncio.create_task(ask())


@pytest.fixture
async def replica() -> Replica:
    return Replica()


def since(began: float, at: int) -> bool:
    return int(began) <= at <= time.time()


async def test_what_gateways_say_of_a_request_is_its_context_and_no_header_of_it(replica: Replica):
    fields = (link.TIER, b"priority"), (link.TENANT, b"t"), (STREAM, b"3"), (link.ADAPTER, b"a"), (b"x", b"y")
    began = time.time()
    assert (await replica.begin(*fields, body=b"{}"))[::2] == (200, b"done")
    scope, context = replica.scopes[0], replica.contexts[0]
    assert scope["headers"] == [(link.ADAPTER, b"a"), (b"x", b"y")]
    assert scope["extensions"] == {TRUSTED: {}}
    assert replica.bodies == [b"{}"]
    assert since(began, context.pop("created"))
    assert len(context.pop("id_seed")) == 16
    assert context == {"current_replica": "r_t", "tier": "priority", "tokens_before": (), "start_tag": 0}


@pytest.mark.parametrize("version", ["v", ""])
@pytest.mark.parametrize("field", [(STREAM, b"3"), (b"x", b"y")], ids=["multiplexed", "alone"])
async def test_only_a_stream_that_can_be_continued_has_an_origin(version: str, field: Field):
    replica = Replica(version=version)
    await replica.begin(field)
    assert bool(replica.contexts[0]["id_seed"]) == (version == "v" and field[0] == STREAM)


@pytest.mark.parametrize(("pieces", "keeper"), [(4, "other_t"), (0, "r_t")], ids=["begun", "unsent"])
async def test_a_continued_answer_has_the_context_that_it_began_with(
    replica: Replica, pieces: int, keeper: str
):
    """Ids name the replica that stores the response, unless the client knows another one."""
    groups, records = encode([[ChoiceTokens((5, 6))], [ChoiceTokens((7,))]])
    origin = Origin(replica.listener._source.serves(), "other", 77, "seed")
    head = b"%d %d %d %b" % (pieces, groups, len(records), origin.to_header())
    await replica.begin((CONTINUE, head), (link.TENANT, b"t"), body=b"{}" + records)
    context = replica.contexts[0]
    assert [tuple(group[0].token_ids) for group in context.pop("tokens_before")] == [(5, 6), (7,)]
    expected = {
        "created": 77,
        "id_seed": "seed",
        "current_replica": keeper,
        "tier": "default",
        "start_tag": 0,
    }
    assert context == expected
    assert replica.bodies == [b"{}"]
    assert dict(replica.scopes[0]["headers"])[b"content-length"] == b"2"


async def test_a_stream_of_another_version_is_refused_here_and_may_go_elsewhere(replica: Replica):
    head = b"4 0 0 " + Origin("another", "other", 77, "seed").to_header()
    status, headers, body = await replica.begin((CONTINUE, head))
    assert (status, headers[link.RETRY], replica.scopes) == (503, link.REFUSED, [])
    assert b"another version" in body


async def test_requests_of_tenants_get_turns_by_their_price(replica: Replica):
    replica.go.clear()
    tasks = [replica.begin((link.SHARE, share)) for share in (b"5 a", b"5 a", b"5 b b")]
    tasks.append(replica.begin())
    await until(lambda: len(replica.contexts) == 4)
    assert [context["start_tag"] for context in replica.contexts] == [0, 5, 0, 0]
    replica.go.set()
    await asyncio.gather(*tasks)
    await replica.begin((link.SHARE, b"5 b b"))
    assert replica.contexts[-1]["start_tag"] == 5
    tags = replica.listener._tags["default"]
    assert not tags._waiting


async def test_a_share_of_a_request_that_the_engine_never_began_is_given_back(replica: Replica):
    replica.go.clear()
    task = replica.begin((link.SHARE, b"5 a"))
    await until(lambda: replica.contexts)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert replica.listener._tags["default"]._paid == {"a": 0.0}


@pytest.mark.parametrize(("end", "code"), [("refuse", b"unavailable"), ("die", b"engine_dead")])
async def test_what_comes_when_it_takes_nothing_more_may_go_elsewhere(
    replica: Replica, end: str, code: bytes
):
    listener = replica.listener
    listener.die("killed") if end == "die" else listener.refuse()
    listener.refuse()  # of two reasons the first is told
    got, headers, body = await replica.begin()
    assert (got, headers[link.RETRY], replica.scopes) == (503, link.UNTOUCHED, [])
    assert code in body
    assert not listener.open_requests


async def test_a_request_in_an_engine_that_dies_may_go_elsewhere_unless_it_was_begun(replica: Replica):
    replica.go.clear()
    waits = replica.begin()
    await until(lambda: replica.contexts)
    [response] = replica.listener.open_requests.values()
    replica.listener.die("killed")
    status, headers, body = await waits
    assert (status, headers[link.RETRY]) == (503, link.INTERRUPTED)
    assert (b"engine_dead" in body, response._void) == (True, True)
    assert (waits.cancelling(), replica.listener.links._ended) == (0, True)
    begun = Replica()
    begun.go.clear()
    task = begun.begin()
    await until(lambda: begun.contexts)
    [response] = begun.listener.open_requests.values()
    response.started = True
    begun.listener.die("killed")
    assert (await task)[0] == 0  # nothing more is sent


async def test_what_an_endpoint_of_its_own_asks_of_the_engine_is_no_part_of_its_answer():
    seen: list[Any] = []

    class Server:
        @endpoint("/v1/own")
        async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
            if (probe := tokens_so_far.get()) is not None:  # as engines do, for one request after the other
                probe.report(lambda after=0: [(ChoiceTokens([5, 6]),)])
            seen.append((record_tokens.get(), shortcut.get(), id_seed.get()))
            return await asyncio.Future()

    replica = Replica()
    replica.listener._app = CustomEndpoints(
        replica._engine, Server(), LLMConfig(model_loading_config={"model_id": "m"})
    )
    waits = replica.begin((STREAM, b"3"), path="/v1/own", body=b"{}")
    await until(lambda: seen)
    replica.listener.die("killed")
    status, headers, _ = await waits
    assert (status, headers[link.RETRY], headers.get(RESUMABLE)) == (503, link.INTERRUPTED, None)
    assert seen == [(None, None, "")]


async def test_one_whose_client_goes_is_cancelled_and_nothing_is_kept_of_it(replica: Replica):
    replica.go.clear()
    task = replica.begin(body=b"12345678")
    await until(lambda: replica.contexts)
    listener = replica.listener
    assert (len(listener.open_requests), listener._open_by_gateway) == (1, {b"g": 1})
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert (listener.open_requests, listener._prompts, listener._open_by_gateway) == ({}, {}, {})


async def test_open_requests_of_other_gateways_are_counted_apart(replica: Replica):
    replica.go.clear()
    tasks = [replica.begin(), replica.begin(), replica.begin((link.GATEWAY, b"h"))]
    await until(lambda: len(replica.contexts) == 3)
    listener = replica.listener
    assert [listener._open_elsewhere(gateway) for gateway in (b"g", b"h", b"i")] == [1, 2, 3]
    replica.go.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(("longest", "tokens"), [(None, 100), (60, 60)])
async def test_prompts_before_the_engine_are_those_that_came_last(longest: int | None, tokens: int):
    replica = Replica(hello=lambda: link.Hello("m", longest))
    replica.go.clear()
    sizes = (b"80", b"160", b"400")
    fields = [((b"content-length", size),) for size in sizes]
    tasks = [replica.begin(*each) for each in fields]
    tasks.append(replica.begin((b"content-length", b"4"), (link.TIER, b"flex")))
    await until(lambda: len(replica.contexts) == 4)
    count = replica.listener._tokens_before_engine
    assert [count(in_engine) for in_engine in (0, 1, 2, 3, 9)] == [60 + tokens, 40 + tokens, tokens, 0, 0]
    next(iter(replica.listener.open_requests.values())).started = True
    assert count(0) == 40 + tokens
    replica.go.set()
    await asyncio.gather(*tasks)


async def test_batch_does_not_count_as_a_first_token():
    """Its times say nothing of what online requests wait for."""
    told = list[float]()
    replica = Replica(batch=SimpleNamespace(first_token=told.append, running=0))
    for work, count in ((b"flex", 0), (b"default", 1)):
        replica.go.clear()
        task = replica.begin((link.TIER, work), (link.SHARE, b"5 a"))
        await until(lambda: replica.listener.open_requests)
        [response] = replica.listener.open_requests.values()
        response._first_token(0.5)
        tags = replica.listener._tags[work.decode()]
        assert (len(told), tags._waiting) == (count, [])
        replica.go.set()
        await task


async def test_what_an_engine_leaves_unfinished_is_sent_and_not_ended(replica: Replica):
    async def unfinished(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})

    replica.listener._app = unfinished
    assert (await replica.begin(path="/v1/chat/completions"))[::2] == (200, b"{")


async def test_a_stream_that_breaks_off_leaves_the_connection_that_it_shares(replica: Replica):
    async def breaks(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        events = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": events})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        assert 3 in sender._writable

    replica.listener._app = breaks
    connection = replica.begin(path=multiplexer.PATH)
    await until(lambda: replica.listener._multiplexers)
    sender = replica.listener._multiplexers[b"g"]
    assert (await replica.begin((STREAM, b"3")))[1][STREAM] == b"3"
    assert sender._writable == {}
    connection.cancel()


async def test_of_a_stream_that_cannot_go_on_nothing_is_kept(replica: Replica):
    """As of an adapter whose files have no version that replicas could compare."""
    kept = list[int]()

    async def streams(scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        using_adapter.set("a@1")
        record, (response,) = record_tokens.get(), replica.listener.open_requests.values()
        assert record is not None
        events = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": events})
        for token in range(9):
            record((ChoiceTokens((token,)),))
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
            await until(lambda: not sender._waiting_bytes)
            kept.append(len(response._recorded))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    replica.listener._app = streams
    connection = replica.begin(path=multiplexer.PATH)
    await until(lambda: replica.listener._multiplexers)
    sender = replica.listener._multiplexers[b"g"]
    assert RESUMABLE not in (await replica.begin((STREAM, b"3")))[1]
    assert kept == [0] * 9
    connection.cancel()


async def test_only_a_link_and_the_path_for_them_bring_aliases():
    told = list[list[str]]()
    replica = Replica(add_aliases=lambda names: told.append(list(names)))
    names = (link.ALIASES, b"a,b%2Fc")
    await replica.begin(names)
    assert not told
    assert (await replica.begin(names, path=link.ALIASES_PATH))[::2] == (200, b"")
    assert told == [["a", "b/c"]]
    await replica.begin(path=link.ALIASES_PATH)
    assert len(told) == len(replica.scopes) == 1


class Listed:
    def __init__(self, *names: str, error: Exception | None = None) -> None:
        self._names, self._error = names, error

    async def listed(self) -> tuple[str, ...]:
        if self._error is not None:
            raise self._error
        return self._names


@pytest.mark.parametrize(
    ("adapters", "status", "body"),
    [
        (None, 200, b"[]"),
        (Listed("a", "b"), 200, b'["a","b"]'),
        (Listed(error=Unavailable("No bucket.")), 503, b"No bucket."),
    ],
)
async def test_adapters_are_listed(adapters: Any, status: int, body: bytes):
    replica = Replica(adapters=adapters)
    got = await replica.begin(path=link.ADAPTERS_PATH)
    assert (got[0], body in got[2], replica.scopes) == (status, True, [])


async def test_a_stranger_is_told_nothing_and_gets_no_connection_of_its_own(replica: Replica):
    accepted = list[int]()
    extension = {direct_writer.EXTENSION: SimpleNamespace(accept=lambda: accepted.append(1))}
    secret = replica.listener.address.secret
    for wrong in ("guess", "0", secret[:1], secret[:-1], secret + "0", 2 * secret):
        for path in ("/health", "/v1/models", link.PATH):
            assert (await replica.begin(path=path, secret=wrong, **extension))[0] == 403
    assert (replica.scopes, accepted) == ([], [])
    assert (await replica.begin(**extension))[0] == 200
    assert accepted == [1]


async def opened(**more: Any) -> Replica:
    """One whose listener has its socket, too."""
    replica = Replica(load=Load)
    source = replica.listener._source
    replica.listener = await Listener.open(replica._engine, source, node_id="n", node_host=None, **more)
    return replica


@pytest.mark.parametrize("end", ["die", "close"])
async def test_an_end_ends_every_connection_and_request(end: str):
    killed = asyncio.get_running_loop().create_future()
    replica = await opened(wait_dead=lambda: killed, replica_id="r")
    listener = replica.listener
    assert listener.address.replica_id == "r"
    replica.go.clear()
    connections = [replica.begin(path=path) for path in (link.PATH, multiplexer.PATH, rows.PATH)]
    task = replica.begin()
    await until(lambda: replica.contexts and listener._multiplexers and listener._row_receivers)
    if end == "die":
        killed.set_result("killed")
    closing = asyncio.create_task(listener.close()) if end == "close" else None
    await until(lambda: listener._refusal)
    assert listener.links._ended
    assert (await task)[1][link.RETRY] == link.INTERRUPTED
    link_, *_ = await asyncio.wait_for(asyncio.gather(*connections), 10)
    assert b'"hello"' in link_[2]
    assert (listener._multiplexers, listener._row_receivers) == ({}, set())
    assert (await replica.begin())[1][link.RETRY] == link.UNTOUCHED
    await (closing or listener.close())
    assert len(listener._tasks) == 2
    assert all(task.done() for task in listener._tasks)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_unix_connection(listener.address.unix)


async def test_without_a_name_replicas_are_told_apart_and_none_waits_for_a_death():
    replicas = [await opened() for _ in range(2)]
    assert len({one.listener.address.replica_id for one in replicas}) == 2
    for one in replicas:
        await asyncio.open_unix_connection(one.listener.address.unix)
        await one.listener.close()
        await one.listener.close()


async def test_a_gateway_that_connects_anew_keeps_its_new_connection(replica: Replica):
    senders = replica.listener._multiplexers
    first = replica.begin(path=multiplexer.PATH)
    await until(lambda: senders)
    old = senders[b"g"]
    second = replica.begin(path=multiplexer.PATH)
    await until(lambda: senders[b"g"] is not old)
    for task, left in ((first, 1), (second, 0)):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(senders) == left


async def test_draining_waits_for_what_is_open_and_counts_what_it_cuts(replica: Replica):
    listener = replica.listener
    replica.go.clear()
    draining = asyncio.create_task(listener.drain(30))
    await until(lambda: listener.links._draining)
    task = replica.begin()  # it was on its way
    await until(lambda: listener._refusal is not None)
    assert not draining.done()
    replica.go.set()
    assert (await draining, (await task)[0]) == (0, 200)
    replica.go.clear()
    listener._refusal = None
    task = replica.begin()
    await until(lambda: listener.open_requests)
    asyncio.get_running_loop().call_later(0.05, replica.go.set)
    assert await listener.drain(0.0) == 1
    assert (await task)[1][link.RETRY] == link.INTERRUPTED


async def test_a_stream_that_ends_before_its_client_s_place_leaves_nothing_with_the_multiplexer():
    sender, sent = multiplexer.StreamSender(), list[asgi.Message]()

    async def direct(message: asgi.Message) -> None:
        sent.append(message)

    origin = Origin("version", "replica", 1, "seed")
    response = EngineResponse(
        direct, sender, 7, lambda: "", "/v1/chat/completions", "default", None, origin, 3
    )
    response._recorded.append(())
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }
    await response.send(head)
    await response.send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    await response.send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})
    response.close()
    assert sent
    assert not sender._writable
    assert not sender._records


async def test_texts_that_wait_when_their_stream_is_cut_leave_with_the_tokens_that_they_are_made_of():
    async def direct(message: asgi.Message) -> None:
        pass

    sender, receiver, text = multiplexer.StreamSender(), multiplexer.StreamReceiver(), list[bytes]()
    record = StreamRecord(RecordBudget())
    receiver._streams[7] = cast(
        "ReplicaConnection", SimpleNamespace(record=record, feed=lambda piece, last: text.append(piece))
    )
    response = EngineResponse(
        *(direct, sender, 7, lambda: "", "/v1/chat/completions", "default", None),
        Origin("version", "replica", 1, "seed"),
    )
    head = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"text/event-stream")],
    }
    response._recorded.append((ChoiceTokens((5,)),))
    await response.send(head)
    await response.send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    for token in (6, 7):
        response._recorded.append((ChoiceTokens((token,)),))
        response.push(EventFrame(b"data: ", b"\n\n"), b"%d" % token)
    response.close()  # before the gateway could take them
    assert receiver._demultiplex(sender._take()) == b""
    assert b"".join(text) == b"data: 1\n\ndata: 67\n\n"
    assert record.pieces == record.tokens() == 3
    assert not sender._records


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_cannot_continue_a_stream_now_says_so_whole(
    status: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_response, "_DYING_S", 0)
    sent = list[asgi.Message]()

    async def direct(message: asgi.Message) -> None:
        sent.append(message)

    origin = Origin("version", "replica", 1, "seed")
    response = EngineResponse(direct, None, 7, lambda: "", "/v1/chat/completions", "default", None, origin, 3)
    await response.send({"type": "http.response.start", "status": status, "headers": []})
    await response.send({"type": "http.response.body", "body": b"{", "more_body": True})
    await response.send({"type": "http.response.body", "body": b"}", "more_body": False})
    assert sent[0]["status"] == status
    assert b"".join(message["body"] for message in sent[1:]) == b"{}"
    assert not sent[-1]["more_body"]
