"""Clients that embed, rank and classify, and every such endpoint, against a real model of each kind."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cohere
import pytest
from langchain_openai import OpenAIEmbeddings
from openai import OpenAI
from tests.cluster import Cluster
from tests.pages import Page
from tests.ray.clients import (
    GOAL,
    LOAN,
    WAYS,
    ask,
    ask_with_id,
    batch,
    best,
    by_serve,
    config,
    cosine,
    handle,
    likest,
    served,
)

from penstock.serve.openai_api_models import ErrorResponse, RerankRequest

pytestmark = [pytest.mark.full, pytest.mark.parity("S11", "S12", "X8")]

APPLICATION = "pooling"
TASKS = {"task_instructions": {"search_query": "tell me about ", "search_document": ""}}
MODELS = {"embedder", "reranker", "classifier"}


@pytest.fixture(scope="module")
def urls(serve_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Three engines of its own, one of each kind of model that does not write."""
    configs = [
        config("embedder", "embedder", hf_overrides=TASKS),
        config("reranker", "cross_encoder"),
        config("classifier", "classifier"),
    ]
    with served(APPLICATION, configs, serve_url, tmp_path_factory.mktemp("jobs")) as urls:
        yield urls


@pytest.fixture(scope="module", params=WAYS)
def url(request: pytest.FixtureRequest, urls: dict[str, str]) -> str:
    return urls[request.param]


def test_openai_for_python(url: str) -> None:
    openai = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    assert {card.id for card in openai.models.list()} == MODELS
    near, far = openai.embeddings.create(model="embedder", input=[LOAN, GOAL]).data
    query = openai.embeddings.create(model="embedder", input="salary and tax").data[0].embedding
    assert cosine(query, near.embedding) > cosine(query, far.embedding)


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
    embedder = OpenAIEmbeddings(
        model="embedder", check_embedding_ctx_length=False, base_url=f"{url}/v1", api_key="any", max_retries=0
    )
    texts = ["the soup tastes salty", "a chef bakes bread", "the train departs"]
    soup, bread, train = embedder.embed_documents(texts)
    assert cosine(soup, bread) > cosine(soup, train)


# -- every endpoint, by its name on the wire


ENDPOINTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any], Any]] = {
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
    assert look(ask_with_id(url, path, model_id, body)) == expected


@pytest.mark.parity("X2")
@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/score", "/classify"])
def test_every_endpoint_answers_lines_of_batches(urls: dict[str, str], path: str) -> None:
    model_id, body, look, expected = ENDPOINTS[path]
    answers = batch(urls[WAYS[1]], path, [{"model": model_id} | body] * 2)
    assert [look(answer) for answer in answers] == [expected, expected]


def test_bytes_arrive_as_they_are(url: str) -> None:
    body = {"input": [GOAL, LOAN], "encoding_format": "bytes"}
    answer = ask(url, "/v1/embeddings", "embedder", **body)
    assert answer.headers["content-type"] == "application/octet-stream"
    pieces = json.loads(answer.headers["metadata"])["data"]
    assert [piece["end"] - piece["start"] for piece in pieces] == [len(answer.content) / 2] * 2


def test_the_pages_lines_are_answered(urls: dict[str, str], tmp_path: Path) -> None:
    port = int(urls[WAYS[1]].rpartition(":")[2])
    (printed,) = Page("docs/serve/embeddings.md").run(tmp_path, port)
    answers = [json.loads(line) for line in printed.splitlines()]
    embedded, coheres, scored, ranked, judged, pooled = answers
    assert likest(scored) == 0
    assert [row["index"] for row in ranked["results"]] == [1]
    assert [row["label"] for row in judged["data"]] == ["positive", "neutral"]
    soup = embedded["data"][0]["embedding"]
    for same in (coheres["embeddings"]["float"][0], pooled["data"][0]["data"]):
        assert cosine(soup, same) > 0.999


# -- by handle


def test_the_program_of_the_page(urls: dict[str, str], cluster: Cluster, tmp_path: Path) -> None:
    page = Page("docs/serve/handles.md", replaced={'"default"': f'"{APPLICATION}"'})
    printed = page.run(tmp_path, 0, RAY_ADDRESS=cluster.address)
    assert any("the bank pays interest" in text for text in printed)


@by_serve
def test_handles_are_answered_as_clients_are(url: str) -> None:
    (ranked,) = handle(APPLICATION, "reranker").rerank.remote(
        RerankRequest(query="salary and tax", documents=[GOAL, LOAN])
    )
    assert [row["index"] for row in ranked.results] == [1, 0]
    (judged,) = handle(APPLICATION, "classifier").classify.remote({"input": "the film is not bad"})
    assert judged.data[0]["label"] == "positive"
    (pooled,) = handle(APPLICATION, "embedder").pooling.remote({"input": LOAN})
    (embedded,) = handle(APPLICATION, "embedder").embeddings.remote({"input": LOAN})
    assert cosine(pooled.data[0]["data"], embedded.data[0].embedding) > 0.999
    (refused,) = handle(APPLICATION, "embedder").rerank.remote({"query": LOAN * 100, "documents": [LOAN]})
    assert isinstance(refused, ErrorResponse)
    assert refused.error.code == "context_length_exceeded"
