"""Speech by a Serve handle and over HTTP: the audio comes to the replica whole."""

import io
from importlib.util import find_spec

import numpy as np
import pytest
import soundfile
from models import model
from openai import OpenAI
from ray import serve
from tests.pages import Page

from penstock.serve import LLMConfig, LLMServer
from penstock.serve.openai_api_models import TranscriptionRequest
from recipes.speech.voice import RATE, speak

pytestmark = [
    pytest.mark.full,
    pytest.mark.parity("S13", "S33"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

GERMAN, ENGLISH = "sieben eins vier", "seven one four"
LONG_S = 100


def large_wav() -> io.BytesIO:
    """A minute and a half, 3 MB; the words stand at its end."""
    said = speak(GERMAN.split()).samples
    file = io.BytesIO()
    soundfile.write(file, np.pad(said, (LONG_S * RATE - len(said), 0)), RATE, format="WAV", subtype="PCM_16")
    file.seek(0)
    return file


@pytest.fixture(scope="module")
def alone(serve_url):
    """A handle, and a client, of a model that is an application by itself.

    An engine of its own, for all tests of this file: what is tested is the way of an upload through Serve.
    """
    config = LLMConfig(
        model_loading_config={"model_id": "speech", "model_source": str(model("speech"))},
        engine_kwargs={"max_model_len": 64, "kv_cache_memory_bytes": 1 << 25},
    )
    try:
        handle = serve.run(LLMServer.as_deployment().bind(config), name="speech", route_prefix="/speech")
        yield handle, OpenAI(base_url=f"{serve_url}/speech/v1", api_key="any")
    finally:
        serve.delete("speech")


def test_a_handle_takes_an_upload_of_megabytes(alone):
    handle, _ = alone
    asked = handle.options(stream=True)
    (answer,) = asked.transcriptions.remote(TranscriptionRequest(file=large_wav(), language="de"))
    assert answer.usage["seconds"] == LONG_S
    assert answer.text.split() == GERMAN.split()
    (translated,) = asked.translations.remote({"file": large_wav().getvalue(), "language": "de"})
    assert translated.text.split() == ENGLISH.split()


def test_serves_own_http_takes_an_upload_of_megabytes(alone):
    _, client = alone
    answer = client.audio.transcriptions.create(model="speech", file=("a.wav", large_wav()), language="de")
    assert answer.usage.seconds == LONG_S
    assert answer.text.split() == GERMAN.split()


def test_the_page(alone, serve_url, cluster, tmp_path):
    said = speak(GERMAN.split()).samples
    soundfile.write(tmp_path / "numbers.wav", said, RATE, subtype="PCM_16")
    here = {"http://127.0.0.1:8000": f"{serve_url}/speech", '"penstock"': '"speech"'}
    asked, by_handle = Page("docs/serve/speech.md", replaced=here).run(
        tmp_path, 0, RAY_ADDRESS=cluster.address
    )
    assert asked.count(GERMAN) == 2
    assert ENGLISH in asked
    assert GERMAN in by_handle
