"""A program for speech, as Ray's pages write theirs, with the project's prefix.

A real engine of its own: the simulator hears nothing, and an upload's way from the client is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
from openai import OpenAI
from ray import serve
from tests.cluster import Cluster, own_applications
from tests.models import model

from penstock.serve import LLMConfig, build_openai_app
from recipes.speech.voice import RATE, speak

pytestmark = [pytest.mark.full, pytest.mark.parity("S13", "S34")]

WORDS = "sieben eins vier"


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with own_applications():
        llm_config = LLMConfig(
            model_loading_config={"model_id": "whisper-small", "model_source": str(model("speech"))},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
            accelerator_type="A10G",
            engine_kwargs={"max_model_len": 64, "kv_cache_memory_bytes": 1 << 25},
        )
        serve.run(build_openai_app({"llm_configs": [llm_config]}))
        yield OpenAI(base_url=f"{cluster.url}/v1", api_key="fake-key")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech") / "audio.wav"
    soundfile.write(path, speak(WORDS.split()).samples, RATE, subtype="PCM_16")
    return path


def test_a_file_is_transcribed(client: OpenAI, file: Path):
    with file.open("rb") as opened:
        response = client.audio.transcriptions.create(
            model="whisper-small", file=opened, language="de", temperature=0.0
        )
    assert response.text.split() == WORDS.split()


def test_a_transcription_is_streamed(client: OpenAI, file: Path):
    with file.open("rb") as opened:
        stream: Any = client.audio.transcriptions.create(
            model="whisper-small", file=opened, language="de", temperature=0.0, stream=True
        )
        said = "".join(chunk.choices[0]["delta"]["content"] for chunk in stream)
    assert said.split() == WORDS.split()
