"""Forms for uploads: what is encoded reads back as it was."""

import io
import pickle
from typing import Any

import pytest
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from penstock.errors import BadRequest
from penstock.serve.gateway import body
from penstock.serve.openai_api_models import TranscriptionRequest
from penstock.serve.replica.handles import multipart

SOUND = bytes(range(256)) * 5000


async def read(content_type: str, content: bytes) -> FormData:
    """As the engine's app does."""

    async def receive():
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", content_type.encode())]
    return await Request({"type": "http", "method": "POST", "headers": headers}, receive).form()


async def test_fields_and_the_file_read_back_as_they_were():
    fields = {"model": "m", "language": None, "stream": True, "temperature": 0.5, "vllm_xargs": {"a": [1]}}
    kind, content = await multipart.encode(
        {**fields, "timestamp_granularities[]": ["word", "segment"], "file": SOUND}
    )
    found: Any = await read(kind, content)
    assert await found["file"].read() == SOUND
    assert [found[name] for name in ("model", "stream", "temperature")] == ["m", "true", "0.5"]
    assert found["vllm_xargs"] == '{"a":[1]}'
    assert found.getlist("timestamp_granularities[]") == ["word", "segment"]
    assert "language" not in found
    at = await body._form_model(content, kind.encode())
    assert at is not None
    assert content[at] == b"m"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (SOUND, "audio"),
        (bytearray(SOUND), "audio"),
        (io.BytesIO(SOUND), "audio"),
        (("a.wav", SOUND), "a.wav"),
        (("a.wav", io.BytesIO(SOUND), "audio/wav"), "a.wav"),
        (UploadFile(io.BytesIO(SOUND), filename='an "odd" name.wav'), 'an "odd" name.wav'),
    ],
)
async def test_a_file_may_be_bytes_or_opened_with_or_without_a_name(file: object, name: str):
    kind, content = await multipart.encode({"file": file})
    found: Any = (await read(kind, content))["file"]
    assert await found.read() == SOUND
    assert found.filename.replace("%22", '"') == name


@pytest.mark.parametrize("file", ["a.wav", 7, io.StringIO("text"), None])
async def test_what_is_no_file_is_refused_by_name(file: object):
    with pytest.raises(BadRequest, match="'file' must be bytes or a file") as refused:
        await multipart.encode({"file": file})
    assert refused.value.facts["param"] == "file"


def test_a_request_with_an_opened_file_travels_between_processes():
    request = TranscriptionRequest(file=io.BytesIO(SOUND), language="de")
    assert pickle.loads(pickle.dumps(request)).file == ("audio", SOUND)
