"""The demo model, served by vLLM from a bucket and from a gated repository of a hub."""

from __future__ import annotations

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from bucket import s3_server
from enginetest import serve, vllm_config
from hub import TOKEN, hub_server

import penstock
from penstock.config import LLMConfig
from penstock.engines.vllm.engine import VLLMEngine
from penstock.errors import EngineStartFailed

pytestmark = [pytest.mark.parity("S10"), pytest.mark.full]

QUESTION = {"model": "model:under/test", "messages": [{"role": "user", "content": "What is Penstock?"}]}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))


async def test_a_model_in_a_bucket_with_its_tokenizer_elsewhere_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The model's folder in the bucket has no tokenizer: the extra files bring it.

    An engine of its own: where it comes from is the fact.
    """
    demo = Path(penstock.demo_model())
    with s3_server("models", "mirror") as s3:
        s3.upload(demo, "models", "demo")
        for name in ("tokenizer.json", "chat_template.jinja"):
            s3.client.delete_object(Bucket="models", Key=f"demo/{name}")
            s3.client.upload_file(str(demo / name), "mirror", name)
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        source = {
            "bucket_uri": "s3://models/demo",
            "extra_files": [
                {"bucket_uri": "s3://mirror/tokenizer.json", "destination_path": "tokenizer.json"},
                {"bucket_uri": "s3://mirror/chat_template.jinja", "destination_path": "chat_template.jinja"},
            ],
        }
        async with serve(vllm_config(source)) as served:
            answer = (await served.http.post("/v1/chat/completions", json=QUESTION)).json()
    assert "Penstock" in answer["choices"][0]["message"]["content"]


@pytest.mark.parity("S6")
def test_a_gated_model_of_a_hub_starts_with_its_token(tmp_path: Path):
    """An engine in a process of its own, because the hub's client reads where its cache is only once."""
    with hub_server({"org/demo": Path(penstock.demo_model())}, gated={"org/demo"}) as hub:
        environment = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
        assert phases("org/demo", environment) == ["download", "import", "load", "warm up"]


async def test_a_bucket_that_is_not_there_fails_the_start_in_one_sentence(monkeypatch: pytest.MonkeyPatch):
    with s3_server() as s3:
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        config = LLMConfig(model_loading_config={"model_id": "m", "model_source": "s3://nowhere/m"})
        with pytest.raises(EngineStartFailed) as caught:
            await VLLMEngine(config).start()
    said = "Model 'm' cannot start: 's3://nowhere/m' was not found: there is no such bucket."
    assert str(caught.value) == said


def phases(source: str, environment: dict[str, str]) -> list[str]:
    """Those of a start that succeeds."""
    import os

    command = [sys.executable, Path(__file__).parent / "owner.py", source]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        said = [line.strip() for line in takewhile(lambda line: line != "ready\n", owner.stdout)]
        owner.kill()
    return [line for line in said if line in ("download", "import", "load", "warm up")]
