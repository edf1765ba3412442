"""Whatever bytes a client sends, the gateway answers them or hangs up, and goes on for everybody else.

`make fuzz` runs many more of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import Served, chat

pytestmark = pytest.mark.parity("X9")

BODY = json.dumps(chat(max_tokens=2)).encode()
LIMIT_S = 20

METHODS = [b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"post", b"PRI", b"\x16\x03\x01", b""]
PATHS = [
    *(b"/v1/chat/completions", b"/v1/models", b"/v1/models/" + b":" * 3000, b"/health", b"/metrics"),
    *(b"*", b"//", b"/%00", b"/\xff", b"http://x/health", b"/admin/status", b"/" + b"x" * 9000, b""),
]
VERSIONS = [b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b""]
FIELDS = [
    *(b"host: x", b"connection: close", b"connection: keep-alive", b"connection: upgrade, http2-settings"),
    *(b"upgrade: h2c", b"upgrade: websocket", b"expect: 100-continue", b"content-type: application/json"),
    *(b"transfer-encoding: chunked", b"transfer-encoding: gzip", b"transfer-encoding: chunked, chunked"),
    *(b"content-length: %d" % len(BODY), b"content-length: 5", b"content-length: 0", b"content-length: -1"),
    *(b"content-length: 99999999999999999999", b"content-length: 67108864", b"content-length: x"),
    *(b"content-type: multipart/form-data; boundary=a", b"content-type: multipart/form-data"),
    *(b"authorization: Bearer x", b"x-penstock-adapter: x", b"x: \x00", b"x: \xff", b"x y: z", b": z", b"x"),
    *(b"x: " + b"y" * 70_000, b"x: y\r\n" * 3000),
]
BODIES = [
    *(b"", BODY, BODY[:9], BODY * 2, b"{", b"[" * 2000, b'{"model": "m", "messages": ' + b"[" * 2000),
    *(
        b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        b"0\r\n\r\n",
        b"5\r\nhello\r\n",
        b"zz\r\n",
        b"-1\r\n\r\n",
    ),
    *(b"fffffffffffffffff\r\n", b"0\r\nauthorization: Bearer x\r\n\r\n", b"0\r\n" + b"a: b\r\n" * 20_000),
    *(
        b"--a\r\n\r\n--a--",
        b"--a" * 5000,
        b'--a\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--a--',
    ),
]

heads = st.builds(
    lambda method, path, version, fields: b"\r\n".join(
        [b" ".join([method, path, version]), *fields, b"", b""]
    ),
    st.sampled_from(METHODS) | st.just(b"POST"),
    st.sampled_from(PATHS) | st.just(b"/v1/chat/completions"),
    st.sampled_from(VERSIONS) | st.just(b"HTTP/1.1"),
    st.lists(st.sampled_from(FIELDS), max_size=5),
)
messages = st.builds(bytes.__add__, heads, st.sampled_from(BODIES)) | st.binary(max_size=200)
connections = st.builds(
    lambda parts, copies, cut: (b"".join(parts) * copies, cut),
    st.lists(messages, min_size=1, max_size=3),
    st.sampled_from([1, 1, 1, 50]),
    st.none() | st.integers(1, 400),
)


@given(connection=connections)
async def test_odd_bytes_are_answered_or_hung_up_on_and_others_go_on(
    served: Served, caplog: pytest.LogCaptureFixture, connection: tuple[bytes, int | None]
):
    if served.port is None:
        await served.gateway("m")
        await served.replica()
    caplog.clear()
    sent, cut = connection
    async with asyncio.timeout(LIMIT_S):
        answer = await exchange(served.port.number, sent, cut)
    assert not re.search(rb"HTTP/1\.1 5\d\d", answer), answer[:500]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    async with asyncio.timeout(LIMIT_S), served.http() as http:
        assert (await http.post("/v1/chat/completions", json=chat(max_tokens=2))).status_code == 200


async def exchange(port: int, sent: bytes, cut: int | None) -> bytes:
    """What comes back for these bytes, the first `cut` of them apart, until nothing more is said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in (sent,) if cut is None else (sent[:cut], sent[cut:]):
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""  # it hung up
    finally:
        writer.transport.abort()
