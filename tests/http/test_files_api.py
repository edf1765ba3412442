"""The Files API by OpenAI's own client: uploads, lists, contents, deletion, expiry, and what is refused."""

import asyncio
import io
from pathlib import Path

import httpx
import openai
import pytest
from jobs_served import JobsServed, line, lines
from served import until

pytestmark = pytest.mark.parity("X2")

HOUR_S = 3600


async def upload(jobs: JobsServed, content: bytes = b"{}\n", **more):
    file = ("in.jsonl", io.BytesIO(content))
    return await jobs.openai().files.create(file=file, purpose="batch", **more)


async def test_a_file_comes_back_as_it_was_sent(jobs):
    sent = lines(line(f"row-{number}") for number in range(2000))
    file = await upload(jobs, sent)
    assert (file.bytes, file.filename, file.purpose, file.status) == (
        len(sent),
        "in.jsonl",
        "batch",
        "processed",
    )
    assert (await jobs.openai().files.content(file.id)).content == sent
    assert await jobs.openai().files.retrieve(file.id) == file


async def test_files_are_there_after_a_restart(jobs):
    file = await upload(jobs)
    await jobs.restart()
    assert [one.id async for one in await jobs.openai().files.list()] == [file.id]


async def test_a_record_that_cannot_be_read_is_left_alone_and_stops_no_other(jobs):
    good, bad = await upload(jobs), await upload(jobs)
    record, content = (jobs.storage / "files" / f"{bad.id}{suffix}" for suffix in (".json", ".jsonl"))
    record.write_text("{")
    await jobs.restart()
    assert [one.id async for one in await jobs.openai().files.list()] == [good.id]
    assert (record.exists(), content.exists()) == (True, True)


async def test_a_list_comes_in_pages_and_in_either_order(jobs):
    ids = [(await upload(jobs)).id for _ in range(5)]
    client = jobs.openai()
    first = await client.files.list(limit=2)
    assert ([one.id for one in first.data], first.has_more) == ([ids[4], ids[3]], True)
    assert [one.id async for one in client.files.list(limit=2)] == ids[::-1]
    assert [one.id async for one in client.files.list(limit=2, order="asc")] == ids
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []


@pytest.mark.parametrize(
    ("wanted", "status", "found"),
    [
        ("bytes=0-3", 206, b"0123"),
        ("bytes=8-", 206, b"89"),
        ("bytes=-3", 206, b"789"),
        ("bytes=8-100", 206, b"89"),
        ("bytes=10-", 416, b""),
        ("bytes=0-1,3-4", 200, b"0123456789"),
        ("lines=0-1", 200, b"0123456789"),
    ],
)
async def test_a_range_of_the_content(jobs, wanted: str, status: int, found: bytes):
    file = await upload(jobs, b"0123456789")
    async with jobs.http() as http:
        answer = await http.get(f"/v1/files/{file.id}/content", headers={"range": wanted})
    assert (answer.status_code, answer.content) == (status, found)
    assert answer.headers.get("content-range", "").endswith("/10") == (status != 200)


async def test_a_content_is_as_long_as_the_storage_says_and_404_without_one(jobs):
    """An owner that was replaced may end the upload of an output after its successor has written it."""
    file = await upload(jobs, b"first\n")
    (content,) = jobs.storage.glob("files/*.jsonl")
    content.write_bytes(b"another\n")
    assert (await jobs.openai().files.content(file.id)).content == b"another\n"
    content.unlink()
    with pytest.raises(openai.NotFoundError, match="not in the storage"):
        await jobs.openai().files.content(file.id)


async def test_a_deleted_file_is_gone(jobs):
    file, client = await upload(jobs), jobs.openai()
    assert (await client.files.delete(file.id)).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    assert not [one for one in (jobs.storage / "files").iterdir() if file.id in one.name]


async def test_files_expire(jobs, patched):
    file = await upload(jobs, expires_after={"anchor": "created_at", "seconds": HOUR_S})
    kept = await upload(jobs)
    assert file.expires_at == file.created_at + HOUR_S
    assert kept.expires_at == kept.created_at + 30 * 24 * HOUR_S
    patched("penstock.jobs.records.now_s", lambda: file.created_at + HOUR_S)
    with pytest.raises(openai.NotFoundError, match="expired"):
        await jobs.openai().files.retrieve(file.id)
    await jobs.service.files.remove_expired()
    assert not [one for one in (jobs.storage / "files").iterdir() if file.id in one.name]
    assert [one.id async for one in jobs.openai().files.list()] == [kept.id]


@pytest.mark.parametrize("seconds", [3599, 30 * 24 * HOUR_S + 1, -1, "soon"])
async def test_an_expiry_out_of_range_is_400(jobs, seconds):
    with pytest.raises(openai.BadRequestError, match=r"from 3600 \(an hour\) to 2592000") as refused:
        await upload(jobs, expires_after={"anchor": "created_at", "seconds": seconds})
    assert refused.value.param == "expires_after"


async def test_uploads_that_are_refused_leave_nothing_behind(jobs):
    client = jobs.openai()
    with pytest.raises(openai.BadRequestError, match="must be 'batch'"):
        await client.files.create(file=b"{}", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="is empty"):
        await upload(jobs, b"")
    async with jobs.http() as http:
        form = {"content-type": "multipart/form-data; boundary=x"}
        half = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nhalf'
        answers = [
            await http.post("/v1/files", json={"purpose": "batch"}),
            await http.post("/v1/files", files={"other": b"{}"}, data={"purpose": "batch"}),
            await http.post("/v1/files", files={"file": b"{}"}),
            await http.post("/v1/files", content=half, headers=form),
            await http.post("/v1/files", content=b"no form", headers=form),
        ]
    sentences = ["multipart/form-data", "no part named 'file'", "no field 'purpose'", "incomplete", "read"]
    for answer, sentence in zip(answers, sentences, strict=True):
        assert answer.status_code == 400
        assert sentence in answer.json()["error"]["message"]
    assert not [one for one in (jobs.storage / "files").glob("*") if one.is_file()]


@pytest.mark.parametrize(
    ("content", "byte"),
    [
        ('{"ä": 1}\n'.encode("utf-16"), "0xff"),
        ('{"a": 1}\n'.encode("utf-16-le"), "0x00"),
        ('{"ä": 1}\n'.encode("latin-1"), "0xe4"),
        ('{"ä": 1}\n'.encode()[:3], "0xc3"),
    ],
    ids=["utf-16", "utf-16 without a mark", "latin-1", "cut off"],
)
async def test_a_file_that_is_not_utf8_is_refused(jobs, content: bytes, byte: str):
    with pytest.raises(openai.BadRequestError, match=rf"not UTF-8 \(byte {byte}\); save it") as refused:
        await upload(jobs, content)
    assert refused.value.param == "file"


async def test_a_file_whose_characters_are_cut_by_its_pieces_is_utf8(jobs):
    content = "aäß€𝄞".encode() * 300_001
    assert (await jobs.openai().files.content((await upload(jobs, content)).id)).content == content


@pytest.mark.parametrize("jobs", [{"max_file_bytes": 100_000}], indirect=True)
async def test_a_file_over_the_limit_is_413(jobs):
    assert (await upload(jobs, b"x" * 100_000)).bytes == 100_000
    with pytest.raises(openai.APIStatusError, match="larger than 100,000 bytes") as refused:
        await upload(jobs, b"x" * 100_001)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("jobs", [{"max_storage_bytes": 100_000}], indirect=True)
async def test_a_file_without_room_is_507_and_the_others_stay(jobs):
    first = await upload(jobs, b"x" * 60_000)
    with pytest.raises(openai.APIStatusError, match="Delete some first") as refused:
        await upload(jobs, b"x" * 60_000)
    assert refused.value.status_code == 507
    await jobs.openai().files.delete(first.id)
    assert (await upload(jobs, b"x" * 60_000)).bytes == 60_000


async def test_an_upload_that_the_client_gives_up_leaves_nothing_behind(jobs):
    async def pieces():
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * (2 << 20)
        await until(lambda: unfinished(jobs))
        raise ConnectionError

    async with jobs.http() as http:
        with pytest.raises(ConnectionError):
            await http.post(
                "/v1/files", content=pieces(), headers={"content-type": "multipart/form-data; boundary=x"}
            )
    await until(lambda: not unfinished(jobs))


def unfinished(jobs: JobsServed) -> list[Path]:
    return list((jobs.storage / "files").glob(".*.unfinished"))


async def test_a_second_process_waits_for_the_storage_and_takes_over(jobs, served, tmp_path):
    other = JobsServed(served, jobs.storage, {})
    starting = asyncio.create_task(other.start())
    file = await upload(jobs)
    await asyncio.sleep(0)
    assert not starting.done()
    async with other.http() as http:
        answer = await http.get("/v1/files")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    await jobs.stop()
    await starting
    assert [one.id async for one in other.openai().files.list()] == [file.id]
    await other.stop()
    await jobs.start()


async def test_a_form_is_bounded_beside_its_file(jobs):
    """Parts without data, many parts, bytes behind the last boundary: none is kept, or read to its end."""
    head = b'--B\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'
    purpose, file = head % b"purpose" + b"batch\r\n", head % b'file"; filename="f' + b"{}\n\r\n"
    forms = {
        "more than 17 parts": [head % b"x%d" % number + b"\r\n" for number in range(20)] + [b"--B--\r\n"],
        "bytes beside its file": [purpose, file, b"--B--\r\n", *[b"x" * 65_536] * 8],
        "has more than 4,096 bytes": [head % b"purpose" + b"x" * 10_000 + b"\r\n", file, b"--B--\r\n"],
    }
    for reason, pieces in forms.items():
        answer = await send_form(jobs, pieces, boundary="B")
        assert (answer.status_code, reason in answer.text) == (400, True), answer.text
    good = await send_form(jobs, [purpose, file, b"--B--\r\n"], boundary="B")
    assert (good.status_code, good.json()["bytes"]) == (200, 3)


async def test_a_boundary_that_is_too_long_is_refused(jobs):
    answer = await send_form(jobs, [b"--B--\r\n"], boundary="B" * 300)
    assert (answer.status_code, "boundary" in answer.json()["error"]["message"]) == (400, True)


async def send_form(jobs: JobsServed, pieces: list[bytes], *, boundary: str) -> httpx.Response:
    async def content():
        for piece in pieces:
            yield piece

    headers = {"content-type": f"multipart/form-data; boundary={boundary}"}
    async with httpx.AsyncClient(base_url=jobs.url) as http:
        return await http.post("/v1/files", content=content(), headers=headers)
