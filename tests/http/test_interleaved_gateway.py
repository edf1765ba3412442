"""Requests through a gateway and a replica, disturbed at each await of the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from interleaving import Start, disturbed, ended
from served import Served, chat, until

from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http import direct_writer


def asked(**fields: Any) -> tuple[dict[str, Any], Any, Any, list[Any]]:
    """A request as the gateway gets it from its port, and what it answers."""
    body, said = json.dumps(chat(max_tokens=3, **fields)).encode(), []
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
