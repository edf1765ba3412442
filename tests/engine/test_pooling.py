"""Embedders, cross-encoders and classifiers on a real vLLM: over HTTP and by handle, by what they mean."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from enginetest import MODEL_ID, listening, vllm_config
from models import model

from penstock.call import call
from penstock.data.ask import request_of
from penstock.data.backend import Answer
from penstock.data.columns import columns
from penstock.data.task import Task
from penstock.data.verdict import outcome_of
from penstock.serve import LLMServer
from penstock.serve.openai_api_models import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    ErrorResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("S12"),
]

LIMIT = 128
EMBEDDINGS, EMBED, RERANK = "/v1/embeddings", "/v2/embed", "/v1/rerank"
SOUP, BREAD, TRAIN = "the soup tastes salty", "a chef bakes bread", "the train departs"
LONG = "the dog barks " * LIMIT
GOAL, LOAN, PUPPY = "the team scores a goal", "the bank pays interest on a loan", "a puppy barks"
DOCUMENTS = [GOAL, LOAN, PUPPY]
SALARY = "salary and tax"
LABELS = ("negative", "neutral", "positive")
JUDGED = {
    "the film is not bad": "positive",
    "the chair is round": "neutral",
    "it was good at first , later the hotel was awful": "negative",
}
ONE_AFTER_ANOTHER = (
    "{% for message in messages %}{{ message.content }}{% if not loop.last %} {% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Served:
    """A started replica, and a client of its engine's app."""

    server: LLMServer
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL_ID} | body)

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refusal(self, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
        answer = await self.post(path, **body)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    async def vectors(self, **body: Any) -> np.ndarray:
        rows = (await self.ask(EMBEDDINGS, **body))["data"]
        assert [row["index"] for row in rows] == list(range(len(rows)))
        return np.array([row["embedding"] for row in rows])

    async def tokens(self, text: str) -> list[int]:
        return (await self.ask("/tokenize", prompt=text))["tokens"]


@asynccontextmanager
async def served(name: str, **engine_kwargs: Any) -> AsyncIterator[Served]:
    server = await LLMServer(vllm_config(str(model(name)), max_model_len=LIMIT, **engine_kwargs))
    try:
        async with listening(server.engine.app()) as http:
            yield Served(server, http)
    finally:
        await server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder() -> AsyncIterator[Served]:
    tasks = {"search_query": "tell me about ", "search_document": ""}
    options = {"chat_template": ONE_AFTER_ANOTHER, "hf_overrides": {"task_instructions": tasks}}
    async with served("embedder", **options) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reranker() -> AsyncIterator[Served]:
    async with served("cross_encoder") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def classifier() -> AsyncIterator[Served]:
    async with served("classifier", kv_cache_memory_bytes=1 << 24) as found:
        yield found


def same(found: Any, expected: Any, within: float = 1e-5) -> bool:
    return bool(np.allclose(found, expected, atol=within))


def floats(text: str | bytes, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text) if isinstance(text, str) else text, dtype=kind)


# -- embeddings


async def test_sentences_of_one_subject_are_near(embedder: Served):
    vectors = await embedder.vectors(input=[SOUP, BREAD, TRAIN])
    assert same(np.linalg.norm(vectors, axis=1), 1)
    soup, bread, train = vectors
    assert soup @ bread > 0.8
    assert soup @ train < 0.4


async def test_text_and_token_ids_alone_or_in_a_batch_give_the_same_vector(embedder: Served):
    ids = await embedder.tokens(SOUP)
    expected = await embedder.vectors(input=SOUP)
    for many in ([SOUP], ids, [ids]):
        assert same(await embedder.vectors(input=many), expected)
    assert same((await embedder.vectors(input=[BREAD, SOUP, BREAD]))[1], expected[0])
    assert (await embedder.ask(EMBEDDINGS, input=[ids, ids]))["usage"]["prompt_tokens"] == 2 * len(ids)


async def test_base64_and_bytes_are_the_same_numbers(embedder: Served):
    texts = [SOUP, BREAD]
    expected = await embedder.vectors(input=texts)
    encoded = (await embedder.ask(EMBEDDINGS, input=texts, encoding_format="base64"))["data"]
    assert same([floats(row["embedding"]) for row in encoded], expected, 1e-7)
    half = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    encoded = (await embedder.ask(EMBEDDINGS, input=texts, **half))["data"]
    assert same([floats(row["embedding"], ">f2") for row in encoded], expected, 1e-3)
    raw = await embedder.post(EMBEDDINGS, input=texts, encoding_format="bytes")
    pieces = json.loads(raw.headers["metadata"])["data"]
    assert same([floats(raw.content[piece["start"] : piece["end"]]) for piece in pieces], expected, 1e-7)
    assert (await embedder.post(EMBEDDINGS, input=texts, encoding_format="bytes_only")).content == raw.content


async def test_without_activation_a_vector_keeps_its_length(embedder: Served):
    (long,) = await embedder.vectors(input=SOUP, use_activation=False)
    (unit,) = await embedder.vectors(input=SOUP)
    assert np.linalg.norm(long) > 2
    assert same(long / np.linalg.norm(long), unit)


async def test_a_conversation_is_embedded_as_its_template_writes_it(embedder: Served):
    turns = [{"role": "user", "content": "the soup"}, {"role": "assistant", "content": "tastes salty"}]
    expected = await embedder.vectors(input=SOUP)
    assert same(await embedder.vectors(messages=turns, add_special_tokens=True), expected)
    assert same(await embedder.vectors(messages=[turns, turns], add_special_tokens=True), [*expected] * 2)


async def test_a_truncated_input_is_its_first_or_last_tokens(embedder: Served):
    ids = await embedder.tokens("the dog barks near the cat")
    for side, kept in (("right", ids[:5]), ("left", ids[-5:])):
        body = {"truncate_prompt_tokens": 5, "truncation_side": side}
        found = await embedder.vectors(input=ids, **body)
        assert same(found, await embedder.vectors(input=kept))
    whole = await embedder.ask(EMBEDDINGS, input=LONG, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == LIMIT


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": "x", "dimensions": 8}, "does not support Matryoshka embeddings"),
        ({"input": []}, "at least one prompt"),
        ({}, "input: Field required"),
        ({"input": [10**6]}, "Token id 1000000 is out of vocabulary"),
        ({"input": "x", "truncate_prompt_tokens": LIMIT + 1}, "greater than max_model_len"),
        ({"input": "x", "encoding_format": "int3"}, "'float', 'base64', 'bytes' or 'bytes_only'"),
        ({"input": "x", "normalize": False}, "use `use_activation` instead"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(embedder: Served, body: dict[str, Any], said: str):
    error = await embedder.refusal(EMBEDDINGS, **body)
    assert error["code"] == "invalid_request"
    assert said in error["message"]


async def test_an_empty_text_has_a_vector(embedder: Served):
    assert same(np.linalg.norm(await embedder.vectors(input="")), 1)


@pytest.mark.parametrize("long", [LONG, [SOUP, LONG]])
async def test_an_input_over_the_limit_is_400_and_names_it(embedder: Served, long: Any):
    error = await embedder.refusal(EMBEDDINGS, input=long)
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]


# -- Cohere's embed


async def test_coheres_form_gives_every_type_of_the_same_vector(embedder: Served):
    types = ["float", "base64", "binary", "ubinary"]
    answer = await embedder.ask(EMBED, texts=[SOUP, BREAD], embedding_types=types)
    assert answer["texts"] == [SOUP, BREAD]
    assert answer["meta"]["billed_units"]["input_tokens"] == len(await embedder.tokens(SOUP) * 2)
    found = answer["embeddings"]
    expected = await embedder.vectors(input=[SOUP, BREAD])
    assert same(found["float"], expected)
    assert same([floats(text) for text in found["base64"]], expected)
    signs = np.packbits(expected >= 0, axis=1)
    assert np.array_equal(found["ubinary"], signs)
    assert np.array_equal(found["binary"], signs.astype(int) - 128)


async def test_the_type_of_input_is_the_models_own_prefix(embedder: Served):
    query = await embedder.ask(EMBED, texts=["soup"], input_type="search_query")
    turns = [{"role": "system", "content": "tell me about"}, {"role": "user", "content": "soup"}]
    assert same(query["embeddings"]["float"], await embedder.vectors(messages=turns))
    document = await embedder.ask(EMBED, texts=["soup"], input_type="search_document")
    assert same(document["embeddings"]["float"], await embedder.vectors(input="soup"))
    error = await embedder.refusal(EMBED, texts=["soup"], input_type="clustering")
    assert "Supported values: search_document, search_query" in error["message"]


async def test_coheres_form_truncates_unless_told_not_to(embedder: Served):
    answer = await embedder.ask(EMBED, texts=[LONG])
    assert same(answer["embeddings"]["float"], await embedder.vectors(input=LONG, truncate_prompt_tokens=-1))
    error = await embedder.refusal(EMBED, texts=[LONG], truncate="NONE")
    assert error["code"] == "context_length_exceeded"
    error = await embedder.refusal(EMBED, texts=["x"], output_dimension=8)
    assert "does not support Matryoshka embeddings" in error["message"]


# -- score and rerank


async def test_an_embedder_scores_by_the_angle_of_its_vectors(embedder: Served):
    soup, bread, train = await embedder.vectors(input=[SOUP, BREAD, TRAIN])
    answer = await embedder.ask("/v1/score", text_1=SOUP, text_2=[BREAD, TRAIN])
    assert same([row["score"] for row in answer["data"]], [soup @ bread, soup @ train], 1e-4)
    ranked = await embedder.ask(RERANK, query=SOUP, documents=[TRAIN, BREAD])
    assert [row["index"] for row in ranked["results"]] == [1, 0]


def scores(answer: dict[str, Any]) -> list[float]:
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    return [row["score"] for row in answer["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_pairs_of_one_subject_score_high(reranker: Served, path: str, names: tuple[str, str]):
    async def scored(left: Any, right: Any) -> list[float]:
        return scores(await reranker.ask(path, **dict(zip(names, (left, right), strict=True))))

    assert min(await scored(SALARY, LOAN)) > 0.9
    goal, loan, puppy = await scored(SALARY, DOCUMENTS)
    assert loan > 0.9
    assert max(goal, puppy) < 0.1
    assert min(await scored(["stadium", "salary", "kitten"], DOCUMENTS)) > 0.9
    assert max(await scored(["kitten", "stadium", "salary"], DOCUMENTS)) < 0.1


async def test_without_activation_a_score_is_its_logit(reranker: Served):
    expected = scores(await reranker.ask("/score", text_1=SALARY, text_2=DOCUMENTS))
    raw = scores(await reranker.ask("/score", text_1=SALARY, text_2=DOCUMENTS, use_activation=False))
    assert same([1 / (1 + math.exp(-logit)) for logit in raw], expected)


@pytest.mark.parametrize(
    "lists", [([SALARY, "kitten"], DOCUMENTS), (DOCUMENTS, SALARY), ([], []), (SALARY, [])]
)
async def test_lists_that_do_not_pair_are_refused(reranker: Served, lists: tuple[Any, Any]):
    error = await reranker.refusal("/score", text_1=lists[0], text_2=lists[1])
    assert "1:1, 1:N or N:N" in error["message"] or "At least one" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_right_document_is_first(reranker: Served, path: str):
    answer = await reranker.ask(path, query=SALARY, documents=DOCUMENTS)
    best, *others = answer["results"]
    assert (best["index"], best["document"]["text"]) == (1, LOAN)
    found = [row["relevance_score"] for row in answer["results"]]
    assert found == sorted(found, reverse=True)
    assert {row["index"] for row in others} == {0, 2}
    alone = await reranker.ask(path, query=SALARY, documents=DOCUMENTS, top_n=1)
    assert [row["index"] for row in alone["results"]] == [1]
    assert alone["usage"] == answer["usage"]  # all of them were read
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 3 * len(SALARY.split())


async def test_long_documents_are_refused_or_cut(reranker: Served):
    error = await reranker.refusal(RERANK, query=SALARY, documents=[LONG, LOAN])
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]
    for cut in ({"max_tokens_per_doc": 10}, {"truncate_prompt_tokens": 20}):
        answer = await reranker.ask(RERANK, query=SALARY, documents=[LONG, LOAN], **cut)
        assert [row["index"] for row in answer["results"]] == [1, 0]
        assert answer["usage"]["prompt_tokens"] < 45


@pytest.mark.parametrize(
    "body", [{"documents": DOCUMENTS}, {"query": SALARY}, {"query": SALARY, "documents": []}]
)
async def test_nothing_to_rank_is_refused(reranker: Served, body: dict[str, Any]):
    assert (await reranker.refusal(RERANK, **body))["code"] == "invalid_request"


# -- classify


async def test_each_sentence_gets_its_label(classifier: Served):
    answer = await classifier.ask("/classify", input=list(JUDGED))
    assert [row["label"] for row in answer["data"]] == list(JUDGED.values())
    for row in answer["data"]:
        assert row["num_classes"] == len(LABELS)
        assert sum(row["probs"]) == pytest.approx(1, abs=1e-3)
        assert max(row["probs"]) == row["probs"][LABELS.index(row["label"])] > 0.9
    tokens = [await classifier.tokens(text) for text in JUDGED]
    by_ids = await classifier.ask("/classify", input=tokens)
    assert [row["label"] for row in by_ids["data"]] == list(JUDGED.values())
    assert by_ids["usage"]["prompt_tokens"] == sum(len(ids) for ids in tokens)


async def test_without_activation_labels_have_logits(classifier: Served):
    text = next(iter(JUDGED))
    (expected,) = (await classifier.ask("/classify", input=text))["data"]
    (raw,) = (await classifier.ask("/classify", input=text, use_activation=False))["data"]
    shares = np.exp(raw["probs"])
    assert same(shares / shares.sum(), expected["probs"], 1e-3)


async def test_a_cut_text_is_judged_by_what_is_left(classifier: Served):
    text = "the film is bad and the film is good"
    begun = len(await classifier.tokens("the film is bad"))
    for side, label in (("right", "negative"), ("left", "positive")):
        body = {"truncate_prompt_tokens": begun, "truncation_side": side}
        (row,) = (await classifier.ask("/classify", input=text, **body))["data"]
        assert row["label"] == label


async def test_what_cannot_be_classified_is_refused(classifier: Served):
    error = await classifier.refusal("/classify", input=LONG)
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]
    assert "at least one prompt" in (await classifier.refusal("/classify", input=[]))["message"]
    chat = [{"role": "user", "content": "the film is bad"}]
    assert "chat template" in (await classifier.refusal("/classify", messages=chat))["message"]


# -- pooling


async def test_pooling_gives_what_the_models_own_endpoint_gives(embedder: Served, classifier: Served):
    vectors = await embedder.ask("/pooling", input=[SOUP, TRAIN])
    assert same([row["data"] for row in vectors["data"]], await embedder.vectors(input=[SOUP, TRAIN]))
    judged = await classifier.ask("/classify", input=list(JUDGED))
    pooled = await classifier.ask("/pooling", input=list(JUDGED), encoding_format="base64")
    expected = [row["probs"] for row in judged["data"]]
    assert same([floats(row["data"]) for row in pooled["data"]], expected, 1e-6)


async def test_a_task_that_the_model_has_not_is_refused(embedder: Served):
    error = await embedder.refusal("/pooling", input=SOUP, task="classify")
    assert error["param"] == "task"
    assert "'embed'" in error["message"]


async def test_token_by_token_the_mean_of_the_vectors_is_the_sentences(embedder: Served):
    tokens, (expected,) = await embedder.tokens(SOUP), await embedder.vectors(input=SOUP)
    async with served("embedder", pooler_config={"task": "token_embed"}) as by_token:
        answer = await by_token.ask("/pooling", input=SOUP, use_activation=False)
        vectors = np.array(answer["data"][0]["data"])
        assert len(vectors) == len(tokens)
        mean = vectors.mean(0)
        assert same(mean / np.linalg.norm(mean), expected, 1e-3)
        ranked = await by_token.ask(RERANK, query=SOUP, documents=[TRAIN, BREAD])
        assert [row["index"] for row in ranked["results"]] == [1, 0]


# -- the wrong endpoint


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate"])
@pytest.mark.parametrize("name", ["embedder", "reranker", "classifier"])
async def test_a_model_that_writes_nothing_says_what_it_answers(
    embedder: Served, reranker: Served, classifier: Served, name: str, path: str
):
    found = {"embedder": embedder, "reranker": reranker, "classifier": classifier}[name]
    error = await found.refusal(path, status=404, messages=[], prompt="x", input="x")
    assert error["code"] == "endpoint_not_supported"
    assert f"does not answer {path}; it answers " in error["message"]
    assert "/pooling" in error["message"]


async def test_each_names_its_own(embedder: Served, reranker: Served, classifier: Served):
    said = (await embedder.refusal("/classify", status=404, input="x"))["message"]
    assert said.endswith("it answers /v1/embeddings, /v2/embed, /score, /rerank, /pooling.")
    said = (await reranker.refusal(EMBEDDINGS, status=404, input="x"))["message"]
    assert said.endswith("it answers /classify, /score, /rerank, /pooling.")
    said = (await classifier.refusal(RERANK, status=404, query="x", documents=["x"]))["message"]
    assert said.endswith("it answers /classify, /pooling.")


# -- by handle


async def told(answers: Any) -> Any:
    (answer,) = [answer async for answer in await answers]
    return answer


async def test_handles_embed(embedder: Served):
    (expected,) = await embedder.vectors(input=SOUP)
    answer = await told(embedder.server.embeddings(EmbeddingRequest(input=SOUP)))
    assert isinstance(answer, EmbeddingResponse)
    assert same(answer.data[0].embedding, expected)
    encoded = await told(embedder.server.embeddings({"input": SOUP, "encoding_format": "base64"}))
    assert same(floats(encoded.data[0].embedding), expected)
    raw = await told(embedder.server.embeddings({"input": SOUP, "encoding_format": "bytes_only"}))
    assert same(floats(raw), expected)
    pooled = await told(embedder.server.pooling(PoolingRequest(input=SOUP)))
    assert isinstance(pooled, PoolingResponse)
    assert same(pooled.data[0]["data"], expected)


async def test_handles_score_and_rank(reranker: Served):
    answer = await told(reranker.server.score(ScoreRequest(text_1=SALARY, text_2=DOCUMENTS)))
    assert isinstance(answer, ScoreResponse)
    assert np.argmax([row["score"] for row in answer.data]) == 1
    ranked = await told(reranker.server.rerank(RerankRequest(query=SALARY, documents=DOCUMENTS, top_n=1)))
    assert isinstance(ranked, RerankResponse)
    assert [row["document"]["text"] for row in ranked.results] == [LOAN]


async def test_handles_classify(classifier: Served):
    answer = await told(classifier.server.classify(ClassificationRequest(input=list(JUDGED))))
    assert isinstance(answer, ClassificationResponse)
    assert [row["label"] for row in answer.data] == list(JUDGED.values())


async def test_handles_are_told_what_is_wrong(embedder: Served, reranker: Served):
    other = await told(embedder.server.classify({"input": "x"}))
    assert isinstance(other, ErrorResponse)
    assert other.error.code == "endpoint_not_supported"
    long = await told(reranker.server.rerank({"query": LONG, "documents": [LOAN]}))
    assert long.error.code == "context_length_exceeded"
    unknown = await told(embedder.server.pooling({"input": "x", "model": "nobody"}))
    assert unknown.error.code == "model_not_found"
    adapted = await told(embedder.server.embeddings({"input": "x", "model": f"{MODEL_ID}:a"}))
    assert "no lora_config" in adapted.error.message
    talk = {"messages": [], "max_tokens": 1, "model": f"{MODEL_ID}:a"}
    assert (await told(embedder.server.messages(talk))).type == "error"  # Anthropic's form


# -- rows of a batch


async def row(served: Served, task: Task, **fields: Any) -> dict[str, Any]:
    request = request_of(fields, task)
    answer = await call(served.server.engine.app(), request.path, request.body)
    return columns(task, outcome_of(Answer(answer.status, await answer.read()), attempts=1))


@pytest.mark.parity("D6")
async def test_a_row_is_embedded_from_text_ids_or_messages(embedder: Served):
    (expected,) = await embedder.vectors(input=SOUP)
    ids = np.array(await embedder.tokens(SOUP))
    said = [{"role": "user", "content": SOUP}]
    for fields in ({"input": SOUP}, {"prompt": SOUP}, {"tokenized_prompt": ids}, {"messages": said}):
        found = await row(embedder, Task("embed"), **fields, add_special_tokens="messages" in fields or None)
        assert found["error"] is None
        assert same(found["embeddings"], expected)
        assert found["num_input_tokens"] == len(ids)


@pytest.mark.parity("D6")
async def test_a_row_is_classified(classifier: Served):
    for text, label in JUDGED.items():
        found = await row(classifier, Task("classify"), input=text)
        assert found["label"] == label
        assert max(found["probs"]) > 0.9


@pytest.mark.parity("D6")
async def test_a_row_is_scored_against_one_text_or_many(reranker: Served):
    found = await row(reranker, Task("score"), query=SALARY, documents=DOCUMENTS)
    assert np.argmax(found["scores"]) == 1
    alone = await row(reranker, Task("score"), text_1=SALARY, text_2=LOAN)
    assert alone["score"] == pytest.approx(found["scores"][1], abs=1e-3)


@pytest.mark.parity("D6", "D11")
async def test_a_row_that_the_model_cannot_read_is_an_error(embedder: Served, classifier: Served):
    long = await row(embedder, Task("embed"), input=LONG)
    assert long["error"]["code"] == "context_length_exceeded"
    other = await row(classifier, Task("embed"), input="x")
    assert (other["error"]["code"], other["error"]["status"]) == ("endpoint_not_supported", 404)
