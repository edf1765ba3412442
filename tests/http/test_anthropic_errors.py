"""On the paths of Anthropic's Messages errors have the form that its clients read, wherever they arise."""

import anthropic
import pytest
from served import Served

from penstock.serve.gateway.catalogue import ServedModel

pytestmark = pytest.mark.parity("X8", "S16")

ASKED = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}


def client(served: Served, key: str = "key") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0)


async def test_a_wrong_key_is_an_authentication_error(served: Served):
    await served.replica("m")
    await served.gateway("m", api_key="right")
    with pytest.raises(anthropic.AuthenticationError) as raised:
        await client(served, "wrong").messages.create(**ASKED)
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "authentication_error"


async def test_an_unknown_model_is_not_found_with_those_there_are(served: Served):
    await served.replica("m")
    await served.gateway("m")
    with pytest.raises(anthropic.NotFoundError, match="Served are 'm'") as raised:
        await client(served).messages.create(**ASKED | {"model": "other"})
    assert raised.value.body["error"]["type"] == "not_found_error"


async def test_a_full_line_is_a_rate_limit(served: Served):
    replica = await served.replica("m")
    await served.gateway(ServedModel("m", created=1, max_ongoing_requests=1, max_queued_requests=0))
    await served.until_ready("m", replica.address)
    place = served.table.acquire(served.table.ready("m")[0])
    with pytest.raises(anthropic.RateLimitError) as raised:
        await client(served).messages.create(**ASKED)
    served.table.release(place)
    assert raised.value.body["error"]["type"] == "rate_limit_error"
    assert raised.value.response.headers["retry-after"]


async def test_no_replica_is_overloaded(served: Served):
    await served.gateway("m", wait_for_replica_s=0.01)
    with pytest.raises(anthropic.APIStatusError) as raised:
        await client(served).messages.create(**ASKED)
    assert raised.value.status_code == 503
    assert raised.value.body["error"]["type"] == "overloaded_error"


async def test_a_stream_that_breaks_ends_with_an_error_event(served: Served):
    async def breaks(scope, receive, send):
        fields = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        start = b'event: message_start\ndata: {"type": "message_start"}\n\n'
        await send({"type": "http.response.body", "body": start, "more_body": True})
        raise RuntimeError("the engine's own words")

    await served.app(breaks)
    await served.gateway("m")
    with pytest.raises(anthropic.APIStatusError, match="incomplete") as raised:
        async for _ in await client(served).messages.create(**ASKED, stream=True):
            pass
    assert raised.value.body["error"]["type"] == "overloaded_error"
    assert "own words" not in str(raised.value)


async def test_other_paths_keep_openais_form(served: Served):
    await served.gateway("m")
    async with served.http() as http:
        body = (await http.post("/v1/chat/completions", json={"model": "other", "messages": []})).json()
    assert set(body) == {"error"}
    assert body["error"]["type"] == "invalid_request_error"
