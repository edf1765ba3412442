"""Requests through a gateway and rows through a set of replicas, over sockets, disturbed at each await."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from interleaving import DISTURBANCES, Start, disturbed, ended, failing
from served import NODE, Deployment, Served, chat, until

from penstock.config import GatewayConfig
from penstock.data.backends import serve_lookup
from penstock.data.backends.protocol import Response
from penstock.data.backends.replica_set import ReplicaSet
from penstock.data.rows.request import RowRequest
from penstock.errors import EngineDead, Unavailable
from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http import direct_writer
from penstock.serve.tenancy.limits import Periods
from penstock.serve.tenancy.usage import Settlement, Totals
from penstock.transport.address import Address


def asked(**fields: Any) -> tuple[dict[str, Any], Any, Any, list[Any]]:
    """A request as the gateway gets it from its port, and what it answers."""
    body, said = json.dumps(chat(**{"max_tokens": 3} | fields)).encode(), []
    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 9), "root_path": "", "http_version": "1.1"}
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    return scope, receive, send, said


async def breaks(scope: Any, receive: Any, send: Any) -> None:
    """A replica that loses each request before its answer."""
    direct_writer.of(scope)._transport.abort()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("slots", [1, 9], ids=["waits", "at once"])
def test_a_request_leaves_nothing_wherever_it_ends(stream: bool, slots: int):
    async def requests(start: Start) -> None:
        served = Served()
        try:
            model = ServedModel("m", created=1, max_ongoing_requests=slots)
            gateway = await served.gateway(model, request_timeout_s=600)
            replica = await served.replica("m")
            broken = await served.app(breaks)
            seen = list(served.table)
            asking = []
            for _ in range(3):
                scope, receive, send, said = asked(stream=stream)
                asking.append((start(gateway(scope, receive, send)), said))
            await asyncio.wait([task for task, _ in asking], timeout=1000)
            for task, said in asking:
                if not isinstance(ended()(task), BaseException):
                    assert said[0]["status"] in (200, 503)  # 503: lost twice by the same one, which came back
                    assert not said[-1].get("more_body")
            await until(lambda: not replica.engine.load().running)
            assert [one.in_flight for one in seen] == [0, 0]
            assert (len(served.line("m")), gateway._bodies.used) == (0, 0)
            assert broken
        finally:
            await served.close()

    assert disturbed(requests) >= 8


LOST = failing(ConnectionResetError("gone"), "connect", "head", "read", "whole")


async def cannot_now(scope: Any, receive: Any, send: Any) -> None:
    """A replica whose engine has no room."""
    await receive()
    await send({"type": "http.response.start", "status": 503, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def test_a_request_that_goes_elsewhere_has_one_answer_wherever_it_fails():
    async def requests(start: Start) -> None:
        served = Served()
        try:
            model = ServedModel("m", created=1, fallbacks=("other",), max_ongoing_requests=2)
            gateway = await served.gateway(model, ServedModel("other", created=1), request_timeout_s=600)
            for app in (breaks, cannot_now, breaks):
                await served.app(app)
            replicas = [await served.replica("other") for _ in range(2)]
            asking = []
            for _ in range(4):
                scope, receive, send, said = asked(stream=True)
                asking.append((start(gateway(scope, receive, send)), said))
            await asyncio.wait([task for task, _ in asking], timeout=1000)
            for task, said in asking:
                if not isinstance(ended()(task), BaseException):
                    starts = [one["status"] for one in said if one["type"] == "http.response.start"]
                    assert starts in ([200], [503])  # 503: two replicas lost it, which may be its fault
                    assert [one.get("more_body", False) for one in said[1:]].count(False) == 1
            await until(lambda: not any(one.engine.load().running for one in replicas))
            assert [one.in_flight for one in served.table] == [0] * 5
            assert [served.table.leases(one) for one in ("m", "other")] == [0, 0]
            assert (len(served.line("m")), len(served.line("other")), gateway._bodies.used) == (0, 0, 0)
        finally:
            await served.close()

    assert disturbed(requests, (*DISTURBANCES, LOST)) >= 15


def test_a_stream_that_goes_on_says_nothing_twice_wherever_it_is_disturbed():
    """Its replica dies; the next one drains when it has it."""

    whole_text = "hello" * 6  # in 12 tokens

    def said_by(said: list[Any]) -> tuple[str, bool]:
        body = b"".join(one.get("body", b"") for one in said if one["type"] == "http.response.body").decode()
        data = [event.removeprefix("data: ") for event in body.split("\n\n") if event]
        texts = [
            json.loads(one)["choices"][0]["delta"].get("content", "") for one in data if '"delta"' in one
        ]
        assert [one for one in data if '"delta"' not in one and "error" not in one] in ([], ["[DONE]"])
        return "".join(texts), data[-1:] == ["[DONE]"]

    async def streams(start: Start) -> None:
        served = Served()
        try:
            model = ServedModel("m", created=1, max_ongoing_requests=3)
            gateway = await served.gateway(model, request_timeout_s=600)
            dying = await served.replica("m", step_base_ms=50, die_after_tokens=4)
            asking = []
            for _ in range(2):
                scope, receive, send, said = asked(stream=True, max_tokens=12, ignore_eos=True)
                asking.append((start(gateway(scope, receive, send)), said))
            await asyncio.sleep(0.01)
            drains, last = [await served.replica("m", step_base_ms=50) for _ in range(2)]
            seen = list(served.table)
            await asyncio.sleep(0.3)
            drains.listener.links.drain()
            await asyncio.wait([task for task, _ in asking], timeout=1000)
            for task, said in asking:
                left = isinstance(ended()(task), BaseException)
                text, whole = said_by(said)
                assert text == whole_text if whole else whole_text.startswith(text)
                assert whole or left or b'"error"' in said[-1]["body"]
            await until(lambda: not any(one.engine.load().running for one in (drains, last)))
            assert [one.in_flight for one in seen] == [0, 0, 0]
            assert (served.table.leases("m"), len(served.line("m")), gateway._bodies.used) == (0, 0, 0)
            assert (gateway._dispatch._records.reserved, dict(gateway._dispatch._streams._at)) == (0, {})
            assert dying
        finally:
            await served.close()

    assert disturbed(streams, (*DISTURBANCES, LOST)) >= 12


def test_a_replica_is_known_again_wherever_its_link_fails():
    """One of them on another node, where it listens once it is asked to; it leaves and comes back."""

    async def links(start: Start) -> None:
        served = Served()
        here, there = [await served.replica(join=False, node_id=node) for node in (NODE, "there")]

        async def unreachable(model_id: str) -> None:
            await asyncio.sleep(0.1)
            await there.listener.sockets.listen_on_network()

        links = ReplicaLinks(served.table, "g", unreachable)
        served.table.watch(links.join, links.leave, bool)

        async def come(*addresses: Address) -> None:
            served.add("m", *addresses)

        async def ready() -> None:
            await until(lambda: len(served.table.ready("m")) == 2, 300)

        try:
            await start(come(here.address, there.address))
            await ready()
            asking = [start(links.get(replica, "/v1/models", 10.0)) for replica in served.table]
            served.remove("m", there.address)
            await start(come(there.address))
            await ready()
            _, open_ = await asyncio.wait(asking, timeout=1000)
            assert not open_
            for task in asking:
                ended(OSError)(task)
            assert all([await links.get(replica, "/v1/models", 10.0) for replica in served.table])
        finally:
            await links.close()
            await served.close()
        assert (links._tasks, links._pools, links._background) == ({}, {}, set())

    also = ("_follow", "_keep_multiplexed", "_ask")
    odd = failing(KeyError("bug"), "_listen"), failing(TimeoutError(), "_listen")
    assert disturbed(links, (*DISTURBANCES, LOST, *odd), also) >= 15


def test_a_gateway_changes_whole_or_not_at_all_wherever_a_change_ends(tmp_path: Path):
    (tmp_path / "keys.yaml").write_text("keys: [{tenant: t, name: n, key: the-only-key-of-tenant-t}]")
    keyed = GatewayConfig(keys_file=str(tmp_path / "keys.yaml"), max_body_bytes=1000)
    m, n = ServedModel("m", 1), ServedModel("n", 1)
    wanted = [dataclasses.replace(m, aliases=("x",)), ServedModel("o", 1)]

    def state(gateway: Gateway) -> tuple[Any, ...]:
        catalogue, dispatch, auth = gateway._catalogue, gateway._dispatch, gateway._auth
        names = {*catalogue._named}, {*dispatch._served}, gateway._links._aliases["m"]
        return *names, auth.keyed, gateway._tenants is not None, gateway._config.max_body_bytes

    async def settle(settlement: Settlement) -> Totals:
        await asyncio.sleep(0.1)
        return Totals(Periods.at(0.0), {})

    async def changes(start: Start) -> None:
        served = Served()
        try:
            gateway = await served.gateway(m, n, settle=settle)
            await served.replica("m")
            before = state(gateway)
            task = start(gateway.reconfigure(keyed, wanted, {}))
            await asyncio.wait([task], timeout=1000)
            failed = isinstance(ended(OSError)(task), BaseException)
            after = {"m", "x", "o"}, {"m", "o"}, ("x",), True, True, 1000
            assert state(gateway) == (before if failed else after)
            await gateway.reconfigure(keyed, wanted, {})
            assert state(gateway) == after
        finally:
            await served.close()

    failed = failing(OSError("it cannot be read"), "read_keys")
    assert disturbed(changes, (*DISTURBANCES, LOST, failed), ("_announce",)) >= 5


def test_a_row_has_one_outcome_wherever_it_or_its_replica_ends(monkeypatch: pytest.MonkeyPatch):
    async def rows(start: Start) -> None:
        served, serve = Served(), Deployment(pause_s=0.1)
        monkeypatch.setattr(serve_lookup, "node_id", lambda: NODE)
        monkeypatch.setattr(serve_lookup, "find_deployment", lambda app, name: serve)
        dying, other = [await served.replica(join=False, step_base_ms=200) for _ in range(2)]
        serve.members = [dying]
        body = b'{"prompt": "hello", "max_tokens": 12, "ignore_eos": true}'
        row = RowRequest(path="/v1/completions", body=body)
        replicas = ReplicaSet("app")

        async def send() -> Response:
            await replicas.start()
            return await replicas.send(row)

        try:
            tasks = [start(send()) for _ in range(3)]
            await asyncio.sleep(1.5)
            serve.members = [dying, other]
            await asyncio.sleep(3)
            serve.members = [other]
            dying.engine.die("killed")
            await dying.listener.close()
            tasks += [start(send()) for _ in range(2)]
            _, open_ = await asyncio.wait(tasks, timeout=1000)
            assert not open_
            ends = list(map(ended(EngineDead, Unavailable), tasks))
            assert {end.status for end in ends if isinstance(end, Response)} <= {200}
            assert sum(isinstance(end, Response) for end in ends[3:]) >= 1
            await asyncio.sleep(5)
            assert [(one.id, one.in_flight) for one in replicas._replicas.values()] == [
                (other.address.replica_id, 0)
            ]
            assert (await asyncio.wait_for(send(), 60)).status == 200
        finally:
            await replicas.stop()
            await served.close()

    disturbances = (*DISTURBANCES, LOST, failing(TimeoutError(), "results_async"))
    assert disturbed(rows, disturbances, also=("_start_replica", "_open_rows")) >= 10
