"""Cross-encoders, classifiers and an embedder by token on a real vLLM, by what their answers mean."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from pooling import (
    BREAD,
    DOCUMENTS,
    EMBEDDINGS,
    JUDGED,
    LABELS,
    LIMIT,
    LOAN,
    LONG,
    RERANK,
    SALARY,
    SOUP,
    TRAIN,
    Pooled,
    pooled,
    row,
    same,
    told,
)

from penstock.data.rows.request import Task
from penstock.serve.openai_api_models import (
    ClassificationRequest,
    ClassificationResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.parity("S12"),
    pytest.mark.full,
]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reranker() -> AsyncIterator[Pooled]:
    """An engine of its own: another model."""
    async with pooled("cross_encoder") as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def classifier() -> AsyncIterator[Pooled]:
    """An engine of its own: another model."""
    async with pooled("classifier", kv_cache_memory_bytes=1 << 24) as found:
        yield found


# -- score and rerank


def scores(answer: dict[str, Any]) -> list[float]:
    assert [row["index"] for row in answer["data"]] == list(range(len(answer["data"])))
    return [row["score"] for row in answer["data"]]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_pairs_of_one_subject_score_high(reranker: Pooled, path: str, names: tuple[str, str]):
    async def scored(left: Any, right: Any) -> list[float]:
        return scores(await reranker.ask(path, **dict(zip(names, (left, right), strict=True))))

    assert min(await scored(SALARY, LOAN)) > 0.9
    goal, loan, puppy = await scored(SALARY, DOCUMENTS)
    assert loan > 0.9
    assert max(goal, puppy) < 0.1
    assert min(await scored(["stadium", "salary", "kitten"], DOCUMENTS)) > 0.9
    assert max(await scored(["kitten", "stadium", "salary"], DOCUMENTS)) < 0.1


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_right_document_is_first(reranker: Pooled, path: str):
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


async def test_long_documents_are_refused_or_cut(reranker: Pooled):
    error = await reranker.refusal(RERANK, query=SALARY, documents=[LONG, LOAN])
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]
    for cut in ({"max_tokens_per_doc": 10}, {"truncate_prompt_tokens": 20}):
        answer = await reranker.ask(RERANK, query=SALARY, documents=[LONG, LOAN], **cut)
        assert [row["index"] for row in answer["results"]] == [1, 0]
        assert answer["usage"]["prompt_tokens"] < 45


# -- classify


async def test_each_sentence_gets_its_label(classifier: Pooled):
    answer = await classifier.ask("/classify", input=list(JUDGED))
    assert [row["label"] for row in answer["data"]] == list(JUDGED.values())
    for one in answer["data"]:
        assert one["num_classes"] == len(LABELS)
        assert sum(one["probs"]) == pytest.approx(1, abs=1e-3)
        assert max(one["probs"]) == one["probs"][LABELS.index(one["label"])] > 0.9
    tokens = [await classifier.tokens(text) for text in JUDGED]
    by_ids = await classifier.ask("/classify", input=tokens)
    assert [row["label"] for row in by_ids["data"]] == list(JUDGED.values())
    assert by_ids["usage"]["prompt_tokens"] == sum(len(ids) for ids in tokens)


async def test_a_cut_text_is_judged_by_what_is_left(classifier: Pooled):
    text = "the film is bad and the film is good"
    begun = len(await classifier.tokens("the film is bad"))
    for side, label in (("right", "negative"), ("left", "positive")):
        body = {"truncate_prompt_tokens": begun, "truncation_side": side}
        (row,) = (await classifier.ask("/classify", input=text, **body))["data"]
        assert row["label"] == label


async def test_what_cannot_be_classified_is_refused(classifier: Pooled):
    error = await classifier.refusal("/classify", input=LONG)
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]
    assert "at least one prompt" in (await classifier.refusal("/classify", input=[]))["message"]
    chat = [{"role": "user", "content": "the film is bad"}]
    assert "chat template" in (await classifier.refusal("/classify", messages=chat))["message"]


# -- pooling


async def test_token_by_token_the_mean_of_the_vectors_is_the_sentences(embedder: Pooled):
    """Against an engine of its own: its pooler is another one."""
    tokens, (expected,) = await embedder.tokens(SOUP), await embedder.vectors(input=SOUP)
    async with pooled("embedder", pooler_config={"task": "token_embed"}) as by_token:
        answer = await by_token.ask("/pooling", input=SOUP, use_activation=False)
        vectors = np.array(answer["data"][0]["data"])
        assert len(vectors) == len(tokens)
        mean = vectors.mean(0)
        assert same(mean / np.linalg.norm(mean), expected, 1e-3)
        ranked = await by_token.ask(RERANK, query=SOUP, documents=[TRAIN, BREAD])
        assert [row["index"] for row in ranked["results"]] == [1, 0]


# -- the wrong endpoint


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate"])
@pytest.mark.parametrize("name", ["reranker", "classifier"])
async def test_a_model_that_writes_nothing_says_what_it_answers(
    reranker: Pooled, classifier: Pooled, name: str, path: str
):
    found = {"reranker": reranker, "classifier": classifier}[name]
    error = await found.refusal(path, status=404, messages=[], input="x")
    assert error["code"] == "endpoint_not_supported"
    assert f"does not answer {path}; it answers " in error["message"]
    assert "/pooling" in error["message"]


async def test_each_names_its_own(reranker: Pooled, classifier: Pooled):
    said = (await reranker.refusal(EMBEDDINGS, status=404, input="x"))["message"]
    assert said.endswith("it answers /classify, /score, /rerank, /pooling.")
    said = (await classifier.refusal(RERANK, status=404, query="x", documents=["x"]))["message"]
    assert said.endswith("it answers /classify, /pooling.")


# -- by handle


async def test_handles_score_and_rank(reranker: Pooled):
    answer = await told(reranker.server.score(ScoreRequest(text_1=SALARY, text_2=DOCUMENTS)))
    assert isinstance(answer, ScoreResponse)
    assert np.argmax([row["score"] for row in answer.data]) == 1
    ranked = await told(reranker.server.rerank(RerankRequest(query=SALARY, documents=DOCUMENTS, top_n=1)))
    assert isinstance(ranked, RerankResponse)
    assert [row["document"]["text"] for row in ranked.results] == [LOAN]


async def test_handles_classify(classifier: Pooled):
    answer = await told(classifier.server.classify(ClassificationRequest(input=list(JUDGED))))
    assert isinstance(answer, ClassificationResponse)
    assert [row["label"] for row in answer.data] == list(JUDGED.values())


async def test_handles_are_told_what_is_too_long(reranker: Pooled):
    long = await told(reranker.server.rerank({"query": LONG, "documents": [LOAN]}))
    assert long.error.code == "context_length_exceeded"


# -- rows of a batch


@pytest.mark.parity("D6")
async def test_a_row_is_classified(classifier: Pooled):
    for text, label in JUDGED.items():
        found = await row(classifier, Task("classify"), input=text)
        assert found["label"] == label
        assert max(found["probs"]) > 0.9


@pytest.mark.parity("D6")
async def test_a_row_is_scored_against_one_text_or_many(reranker: Pooled):
    found = await row(reranker, Task("score"), query=SALARY, documents=DOCUMENTS)
    assert np.argmax(found["scores"]) == 1
    alone = await row(reranker, Task("score"), text_1=SALARY, text_2=LOAN)
    assert alone["score"] == pytest.approx(found["scores"][1], abs=1e-3)


@pytest.mark.parity("D6", "D11")
async def test_a_row_for_another_kind_of_model_is_an_error(classifier: Pooled):
    other = await row(classifier, Task("embed"), input="x")
    assert (other["error"]["code"], other["error"]["status"]) == ("endpoint_not_supported", 404)
