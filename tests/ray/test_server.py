"""The replica under Serve without a gateway: by handle and over HTTP, with adapters."""

from pathlib import Path

import pytest
from openai import OpenAI
from ray import serve

from penstock.serve import LLMConfig, VLLMService

pytestmark = pytest.mark.parity("S33")

HELLO = [{"role": "user", "content": "Hello there"}]


class Elsewhere:
    """Fetches adapters from where only it knows."""

    def __init__(self, download_timeout_s: float | None, max_tries: int) -> None:
        self.tries = max_tries

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> str:
        return f"{llm_config.lora_config.dynamic_lora_loading_path}/{'ab'[self.tries]}"


@pytest.fixture(scope="module")
def handle(serve_url, tmp_path_factory):
    """An application of its own: what is shown is a server as the whole of one."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    for name in "ab":
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text("{}")
    config = LLMConfig(
        model_loading_config={"model_id": "sim"},
        llm_engine="sim",
        lora_config={"dynamic_lora_loading_path": str(folder), "max_download_tries": 1},
    )
    app = VLLMService.as_deployment().bind(config, model_downloader=Elsewhere)
    yield serve.run(app, name="alone", route_prefix="/alone")
    serve.delete("alone")


@pytest.fixture
def client(serve_url, handle):
    return OpenAI(base_url=f"{serve_url}/alone/v1", api_key="fake-key")


def test_a_service_alone_answers_by_handle_and_over_http(handle, client):
    answers = list(handle.options(stream=True).chat.remote({"messages": HELLO}))
    assert answers[0].choices[0].message.content
    answer = client.chat.completions.create(model="sim", messages=HELLO)
    assert answer.choices[0].message.content == answers[0].choices[0].message.content
    parts = client.chat.completions.create(model="sim", messages=HELLO, stream=True)
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == answer.choices[0].message.content


@pytest.mark.parity("S21", "S23")
def test_handles_choose_an_adapter_by_multiplexed_model_id(handle, client):
    for multiplexed in ("x", "sim:x"):
        chosen = handle.options(stream=True, multiplexed_model_id=multiplexed)
        (answer,) = chosen.chat.remote({"messages": HELLO})
        assert answer.choices[0].message.content == "[x@1] Hello there"
        batches = list(chosen.chat.remote({"messages": HELLO, "stream": True}))
        assert any('"[x@1"' in event for batch in batches for event in batch)
        text = "".join(delta.text for delta in chosen.generate.remote("ahoy"))
        assert text == "[x@1] ahoy"
    assert "".join(delta.text for delta in handle.options(stream=True).generate.remote("ahoy")) == "ahoy"
    assert handle.adapters.remote().result() == ["x"]
    answer = client.chat.completions.create(model="sim:x", messages=HELLO)
    assert (answer.model, answer.choices[0].message.content) == ("sim:x", "[x@1] Hello there")
