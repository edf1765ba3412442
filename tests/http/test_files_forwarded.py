"""Files and batches through the gateway: bodies stream both ways, and the gateway's keys and limits hold."""

import asyncio
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from jobs_served import CHAT, JobsServed, line, lines
from served import Served

from penstock.asgi import lifespan
from penstock.serve.http.private_listener import ListenerClient, PrivateListener
from penstock.serve.jobs.forwarding import JobsForwarder
from penstock.transport.address import Address

pytestmark = pytest.mark.parity("X2")

LARGE = "".join(map(chr, range(1, 0x2000))).encode() * 1000
"""20 MiB: more than sockets hold, and than `max_body_bytes` of these gateways."""


async def in_front(served: Served, jobs: JobsServed, **config) -> Served:
    """The gateway, with files and batches behind it."""

    forwarder = JobsForwarder(ListenerClient(at(lambda: jobs.port_number), "this-node"))
    await served.gateway("m", jobs=forwarder, max_body_bytes=1 << 20, **config)
    return served


def at(port: Callable[[], int]) -> Any:
    """A handle to a process at that port."""

    async def remote(node_id: str) -> dict[str, Any]:
        return Address("jobs", "another-node", None, "127.0.0.1", port(), "secret").to_metadata()

    return SimpleNamespace(address=SimpleNamespace(remote=remote))


async def test_large_files_pass_both_ways(served, jobs):
    front = await in_front(served, jobs)
    client = front.openai()
    file = await client.files.create(file=("in.jsonl", io.BytesIO(LARGE)), purpose="batch")
    assert file.bytes == len(LARGE)
    assert (await client.files.content(file.id)).content == LARGE
    async with front.http() as http:
        part = await http.get(f"/v1/files/{file.id}/content", headers={"range": "bytes=-7"})
        head = await http.head(f"/v1/files/{file.id}/content")
    assert (part.status_code, part.content) == (206, LARGE[-7:])
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(LARGE)))


async def test_requests_to_files_are_counted_as_those_to_no_model(served, jobs):
    client = (await in_front(served, jobs)).openai()
    await client.files.create(file=("in.jsonl", io.BytesIO(b"{}")), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve("file-nowhere")
    async with served.http() as http:
        metrics = (await http.get("/metrics")).text
    for status in (200, 404):
        assert f'penstock_requests_total{{model="",status="{status}"}} 1.0' in metrics


async def test_an_upload_in_chunks_passes(served, jobs):
    front = await in_front(served, jobs)
    boundary = {"content-type": "multipart/form-data; boundary=x"}

    async def chunks():
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for start in range(0, len(LARGE), 100_000):
            yield LARGE[start : start + 100_000]
        yield b"\r\n--x--\r\n"

    async with front.http() as http:
        answer = await http.post("/v1/files", content=chunks(), headers=boundary)
    assert (answer.status_code, answer.json()["bytes"]) == (200, len(LARGE))


@pytest.mark.parametrize("jobs", [{"max_file_bytes": 100_000}], indirect=True)
async def test_an_upload_is_refused_before_its_end(served, jobs):
    front = await in_front(served, jobs)
    with pytest.raises(openai.APIStatusError, match="larger than 100,000 bytes") as refused:
        await front.openai().files.create(file=("in.jsonl", io.BytesIO(LARGE)), purpose="batch")
    assert refused.value.status_code == 413


async def test_a_batch_runs_behind_the_gateways_key(served, jobs):
    front = await in_front(served, jobs, api_key="the-key")
    client = front.openai("the-key")
    content = io.BytesIO(lines([line("a")]))
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    async with asyncio.timeout(60):
        while batch.status != "completed":
            batch = await client.batches.retrieve(batch.id)
    async with front.http() as http:
        for path in ("/v1/files", f"/v1/files/{file.id}/content", "/v1/batches", f"/v1/batches/{batch.id}"):
            assert (await http.get(path)).status_code == 401
        assert (await http.delete(f"/v1/files/{file.id}")).status_code == 401


async def test_a_process_that_ended_is_found_again(served, jobs):
    front = await in_front(served, jobs)
    client = front.openai()
    file = await client.files.create(file=("in.jsonl", io.BytesIO(b"{}")), purpose="batch")
    await jobs.restart()
    assert (await client.files.retrieve(file.id)).id == file.id


async def test_a_stranger_at_the_address_answers_once(served, jobs):
    stranger = await PrivateListener.open(lifespan, "other", "another-node", "127.0.0.1")
    ports = [jobs.port_number, (await stranger.address("this-node"))["port"]]
    await served.gateway("m", jobs=JobsForwarder(ListenerClient(at(ports.pop), "this-node")))
    async with served.http() as http:
        codes = [(await http.get("/v1/files")).status_code for _ in range(3)]
    assert codes == [503, 200, 200]
    await stranger.close(0.0)


async def test_without_files_and_batches_there_are_no_such_paths(served):
    await served.gateway("m")
    async with served.http() as http:
        answers: list[httpx.Response] = [
            await http.get("/v1/files"),
            await http.post("/v1/batches", json={}),
            await http.get("/v1/files/file-1/content"),
        ]
        described = (await http.get("/openapi.json")).json()["paths"]
    assert [one.status_code for one in answers] == [404, 404, 404]
    assert not [path for path in described if path.startswith(("/v1/files", "/v1/batches"))]
