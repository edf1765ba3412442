"""Transcriptions and translations of a Whisper that hears numbers, on a real vLLM, by their words.

Asked behind a gateway, as clients do, and by the methods of an `LLMServer`, as handles do. What is said is
clear: the recipe passes no model that is not sure of such words, wherever in its window they stand.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import soundfile
from enginetest import MODEL_ID, vllm_config
from models import model

from penstock.config import GatewayConfig
from penstock.serve import LLMServer
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.http.server import serve_on
from penstock.serve.openai_api_models import ErrorResponse, TranscriptionRequest
from penstock.serve.replica.inbound.listener import Listener
from penstock.serve.replica.inbound.status_link import StatusSource
from penstock.transport import link
from recipes.speech.voice import RATE, speak

pytestmark = [
    pytest.mark.full,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parity("S13"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

TRANSCRIBE, TRANSLATE = "/v1/audio/transcriptions", "/v1/audio/translations"
GERMAN, ENGLISH = "drei acht fünf", "three eight five"
LONG = "eins sieben neun zwei vier zehn drei sechs acht fünf"
LONG_ENGLISH = "one seven nine two four ten three six eight five"
MIB = 1 << 20


def wav(
    words: str, rate: int = RATE, seconds: float = 0, subtype: str = "PCM_16", form: str = "WAV"
) -> bytes:
    """A file in which `words` are said; then silence until `seconds`."""
    samples = speak(words.split(), pause_s=(0.3, 0.3)).samples
    samples = np.pad(samples, (0, max(0, round(seconds * RATE) - len(samples))))
    at = np.linspace(0, len(samples) - 1, round(len(samples) * rate / RATE))
    file = io.BytesIO()
    soundfile.write(file, np.interp(at, np.arange(len(samples)), samples), rate, format=form, subtype=subtype)
    return file.getvalue()


@dataclass(frozen=True)
class Speech:
    """One replica behind a gateway that serves another model, too."""

    server: LLMServer
    http: httpx.AsyncClient

    async def post(self, path: str, file: bytes, headers: Any = None, **form: Any) -> httpx.Response:
        data = {"model": MODEL_ID, **form}
        return await self.http.post(path, data=data, files={"file": ("a.wav", file)}, headers=headers)

    async def text(self, file: bytes, path: str = TRANSCRIBE, **form: Any) -> str:
        answer = await self.post(path, file, **form)
        assert answer.status_code == 200, answer.text
        return answer.json()["text"]

    async def refusal(self, path: str, **request: Any) -> tuple[int, dict[str, Any]]:
        answer = await self.http.post(path, **request)
        assert answer.headers["x-request-id"]
        return answer.status_code, answer.json()["error"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def speech() -> AsyncIterator[Speech]:
    """An engine of its own, for all tests of this file: no other file asks a model that hears."""
    config = vllm_config(str(model("speech")), kv_cache_memory_bytes=1 << 25, max_model_len=64)
    async with AsyncExitStack() as ends:
        server = await LLMServer(config)
        ends.push_async_callback(server.stop)
        facts = StatusSource(load=server.engine.load, hello=lambda: link.Hello(MODEL_ID, 64))
        listener = await Listener.open(server._app(), facts, node_id="here", node_host=None)
        ends.push_async_callback(listener.close)
        table = Table("here")
        gateway = Gateway(GatewayConfig(), [ServedModel.of(config), ServedModel("another", created=1)], table)
        await gateway.start()
        ends.push_async_callback(gateway.close)
        table.set_members(MODEL_ID, {listener.address.replica_id: listener.address})
        port = await serve_on(gateway, "127.0.0.1", 0)
        ends.push_async_callback(port.close, grace_s=0.2)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port.number}", timeout=60) as http:
            yield Speech(server, http)


def client(speech: Speech) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{speech.http.base_url}/v1", api_key="none", max_retries=0)


# -- what is said


async def test_german_is_written_down_and_translated(speech: Speech):
    sound = wav(GERMAN)
    assert await speech.text(sound) == GERMAN
    assert await speech.text(sound, TRANSLATE) == ENGLISH
    assert await speech.text(wav("six two")) == "six two"


async def test_the_language_asked_for_is_written(speech: Speech):
    sound = wav(GERMAN)
    assert await speech.text(sound, language="de") == GERMAN
    assert await speech.text(sound, language="en") == ENGLISH


async def test_silence_is_no_text(speech: Speech):
    assert await speech.text(wav("", seconds=2)) == ""


@pytest.mark.parametrize(
    ("form", "subtype", "rate"),
    [
        ("WAV", "PCM_24", 48_000),
        ("WAV", "PCM_U8", 16_000),
        ("FLAC", "PCM_16", 44_100),
        ("OGG", "VORBIS", 24_000),
        ("MP3", "MPEG_LAYER_III", 32_000),
    ],
)
async def test_any_usual_format_is_heard(speech: Speech, form: str, subtype: str, rate: int):
    assert await speech.text(wav(GERMAN, rate, form=form, subtype=subtype)) == GERMAN


async def test_audio_longer_than_the_window_is_heard_to_its_end(speech: Speech):
    sound = wav(LONG)
    assert await speech.text(sound) == LONG
    assert await speech.text(sound, TRANSLATE) == LONG_ENGLISH


# -- forms of the answer


async def test_the_verbose_form_tells_language_duration_and_when_each_word_ends(speech: Speech):
    spoken = speak(LONG.split(), pause_s=(0.3, 0.3))
    told = (await speech.post(TRANSCRIBE, wav(LONG), response_format="verbose_json")).json()
    assert (told["text"], told["language"]) == (LONG, "de")
    assert told["duration"] == pytest.approx(spoken.seconds, abs=0.01)
    assert [segment["text"] for segment in told["segments"]] == LONG.split()
    ends = [segment["end"] for segment in told["segments"]]
    assert ends == pytest.approx([end for _, end in spoken.times], abs=0.2)


async def test_the_plain_form_is_the_text_alone(speech: Speech):
    answer = await speech.post(TRANSCRIBE, wav(GERMAN), response_format="text")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == f"{GERMAN}\n"


@pytest.mark.parametrize(("path", "right"), [(TRANSCRIBE, LONG), (TRANSLATE, LONG_ENGLISH)])
async def test_streamed_pieces_join_to_the_same_text(speech: Speech, path: str, right: str):
    answer = await speech.post(path, wav(LONG), stream="true", stream_include_usage="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, end = answer.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    chunks = [json.loads(piece.removeprefix("data: ")) for piece in pieces]
    deltas = [choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(deltas) == right
    assert len([delta for delta in deltas if delta]) > 1
    assert chunks[-1]["usage"]["completion_tokens"] >= len(right.split())


async def test_openais_client_gets_text_streams_and_times(speech: Speech):
    async with client(speech) as asked:
        audio, file = asked.audio, ("numbers.wav", wav(GERMAN))
        whole = await audio.transcriptions.create(model=MODEL_ID, file=file)
        assert whole.text == GERMAN
        assert (await audio.translations.create(model=MODEL_ID, file=file)).text == ENGLISH
        timed = await audio.transcriptions.create(model=MODEL_ID, file=file, response_format="verbose_json")
        assert [segment.text for segment in timed.segments or []] == GERMAN.split()
        plain = await audio.transcriptions.create(model=MODEL_ID, file=file, response_format="text")
        assert str(plain).strip() == GERMAN
        stream = await audio.transcriptions.create(model=MODEL_ID, file=file, stream=True)
        chunks: list[Any] = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0]["delta"]["content"] for chunk in chunks) == GERMAN


async def test_many_at_once_get_their_own_words(speech: Speech):
    words = LONG.split()
    asked = [f"{words[place % 10]} {words[(place * 3 + 1) % 10]}" for place in range(16)]
    assert list(await asyncio.gather(*(speech.text(wav(text)) for text in asked))) == asked


# -- large files


async def test_a_file_of_25_mib_is_heard_to_its_end(speech: Speech):
    """A quarter of an hour, of which every second arrives; the last words stand at its end."""
    quiet = np.zeros(25 * MIB // 2 - 22, "<i2")
    said = (speak(GERMAN.split()).samples * 32767).astype("<i2")
    quiet[: len(said)] = said
    quiet[-len(said) :] = said
    file = io.BytesIO()
    soundfile.write(file, quiet, RATE, format="WAV", subtype="PCM_16")
    assert len(file.getvalue()) == 25 * MIB
    heard = (await speech.post(TRANSCRIBE, file.getvalue())).json()
    assert heard["usage"] == {"type": "duration", "seconds": math.ceil(len(quiet) / RATE)}
    assert heard["text"].split() == [*GERMAN.split(), *GERMAN.split()]


async def test_a_file_over_the_limit_is_413_and_says_the_limit(speech: Speech):
    answer = await speech.post(TRANSCRIBE, b"RIFF" + bytes(25 * MIB))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "body_too_large", "file")
    assert "25 MiB" in error["message"]
    assert "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB" in error["message"]


# -- what cannot be heard


FORM: dict[str, Any] = {"data": {"model": MODEL_ID}, "files": {"file": ("a.wav", b"x")}}


@pytest.mark.parametrize("path", [TRANSCRIBE, TRANSLATE])
@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"files": {"file": ("a.wav", b"no sound at all")}}, None, "audio"),
        ({"files": {"file": ("a.wav", wav(GERMAN)[:40])}}, None, "audio"),
        ({"files": {"file": ("a.wav", b"")}}, None, "audio"),
        ({"files": {"prompt": (None, "x")}}, "file", "file"),
        ({"data": {}}, "model", "'another'"),
        ({"data": {"model": MODEL_ID, "language": "xx"}}, None, "xx"),
        ({"data": {"model": MODEL_ID, "response_format": "srt"}}, None, "verbose_json"),
        ({"data": {"model": MODEL_ID, "temperature": "hot"}}, "temperature", "number"),
    ],
)
async def test_what_cannot_be_heard_is_400_and_says_why(
    speech: Speech, path: str, change: Any, param: str | None, says: str
):
    request = {"data": {"model": MODEL_ID}, "files": {"file": ("a.wav", wav(GERMAN))}} | change
    status, error = await speech.refusal(path, **request)
    assert (status, error["type"]) == (400, "invalid_request_error"), error
    assert says in error["message"]
    assert error["param"] == param or param is None


async def test_json_instead_of_a_form_is_400_and_names_the_file(speech: Speech):
    status, error = await speech.refusal(TRANSCRIBE, json={"model": MODEL_ID})
    assert (status, error["param"]) == (400, "file")


async def test_the_model_may_stand_before_or_after_the_file(speech: Speech):
    """httpx writes fields first, and a file's part where `files` has it."""
    parts = {"model": (None, MODEL_ID), "file": ("a.wav", wav(GERMAN))}
    for files in (parts, dict(reversed(parts.items()))):
        answer = await speech.http.post(TRANSCRIBE, files=files, headers={"x-request-id": "mine"})
        assert (answer.json()["text"], answer.headers["x-request-id"]) == (GERMAN, "mine")


# -- by handle


async def by_handle(speech: Speech, method: str, request: Any) -> Any:
    (answer,) = [item async for item in await getattr(speech.server, method)(request)]
    return answer


async def test_a_handle_takes_bytes_and_files(speech: Speech):
    sound = wav(GERMAN)
    assert (await by_handle(speech, "transcriptions", {"file": sound})).text == GERMAN
    request = TranscriptionRequest(file=io.BytesIO(sound), language="en")
    assert (await by_handle(speech, "transcriptions", request)).text == ENGLISH
    assert (await by_handle(speech, "translations", {"file": ("a.wav", sound)})).text == ENGLISH


async def test_a_handle_gets_the_other_forms(speech: Speech):
    sound = wav(GERMAN)
    timed = await by_handle(speech, "transcriptions", {"file": sound, "response_format": "verbose_json"})
    assert (timed.language, len(timed.segments)) == ("de", 3)
    assert (
        await by_handle(speech, "translations", {"file": sound, "response_format": "text"}) == f"{ENGLISH}\n"
    )
    stream = await speech.server.transcriptions({"file": sound, "stream": True})
    *events, end = [event async for batch in stream for event in batch]
    assert end == "data: [DONE]\n\n"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == GERMAN


async def test_a_handle_is_told_what_is_wrong_with_the_file(speech: Speech):
    broken = await by_handle(speech, "transcriptions", {"file": b"no sound"})
    assert isinstance(broken, ErrorResponse)
    assert broken.error.type == "invalid_request_error"
    path = await by_handle(speech, "transcriptions", {"file": "numbers.wav"})
    assert path.error.param == "file"
    assert "bytes" in path.error.message
