"""An embedder on a real vLLM: over HTTP, by handle and by rows of a batch."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from enginetest import MODEL_ID
from pooling import (
    BREAD,
    EMBED,
    EMBEDDINGS,
    LIMIT,
    LONG,
    RERANK,
    SOUP,
    TRAIN,
    Pooled,
    floats,
    row,
    same,
    told,
)

from penstock.data.rows.request import Task
from penstock.serve.openai_api_models import (
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


# -- embeddings


async def test_sentences_of_one_subject_are_near(embedder: Pooled):
    vectors = await embedder.vectors(input=[SOUP, BREAD, TRAIN])
    assert same(np.linalg.norm(vectors, axis=1), 1)
    soup, bread, train = vectors
    assert soup @ bread > 0.8
    assert soup @ train < 0.4


async def test_text_and_token_ids_alone_or_in_a_batch_give_the_same_vector(embedder: Pooled):
    ids = await embedder.tokens(SOUP)
    expected = await embedder.vectors(input=SOUP)
    for many in ([SOUP], ids, [ids]):
        assert same(await embedder.vectors(input=many), expected)
    assert same((await embedder.vectors(input=[BREAD, SOUP, BREAD]))[1], expected[0])
    assert (await embedder.ask(EMBEDDINGS, input=[ids, ids]))["usage"]["prompt_tokens"] == 2 * len(ids)


async def test_base64_and_bytes_are_the_same_numbers(embedder: Pooled):
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


async def test_without_activation_a_vector_keeps_its_length(embedder: Pooled):
    (long,) = await embedder.vectors(input=SOUP, use_activation=False)
    (unit,) = await embedder.vectors(input=SOUP)
    assert np.linalg.norm(long) > 2
    assert same(long / np.linalg.norm(long), unit)


async def test_a_conversation_is_embedded_as_its_template_writes_it(embedder: Pooled):
    turns = [{"role": "user", "content": "the soup"}, {"role": "assistant", "content": "tastes salty"}]
    expected = await embedder.vectors(input=SOUP)
    assert same(await embedder.vectors(messages=turns, add_special_tokens=True), expected)
    assert same(await embedder.vectors(messages=[turns, turns], add_special_tokens=True), [*expected] * 2)


async def test_a_truncated_input_is_its_first_or_last_tokens(embedder: Pooled):
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
async def test_what_cannot_be_embedded_is_refused(embedder: Pooled, body: dict[str, Any], said: str):
    error = await embedder.refusal(EMBEDDINGS, **body)
    assert error["code"] == "invalid_request"
    assert said in error["message"]


async def test_an_empty_text_has_a_vector(embedder: Pooled):
    assert same(np.linalg.norm(await embedder.vectors(input="")), 1)


@pytest.mark.parametrize("long", [LONG, [SOUP, LONG]])
async def test_an_input_over_the_limit_is_400_and_names_it(embedder: Pooled, long: Any):
    error = await embedder.refusal(EMBEDDINGS, input=long)
    assert error["code"] == "context_length_exceeded"
    assert f"{LIMIT} tokens" in error["message"]


# -- Cohere's embed


async def test_coheres_form_gives_every_type_of_the_same_vector(embedder: Pooled):
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


async def test_the_type_of_input_is_the_models_own_prefix(embedder: Pooled):
    query = await embedder.ask(EMBED, texts=["soup"], input_type="search_query")
    turns = [{"role": "system", "content": "tell me about"}, {"role": "user", "content": "soup"}]
    assert same(query["embeddings"]["float"], await embedder.vectors(messages=turns))
    document = await embedder.ask(EMBED, texts=["soup"], input_type="search_document")
    assert same(document["embeddings"]["float"], await embedder.vectors(input="soup"))
    error = await embedder.refusal(EMBED, texts=["soup"], input_type="clustering")
    assert "Supported values: search_document, search_query" in error["message"]


async def test_coheres_form_truncates_unless_told_not_to(embedder: Pooled):
    answer = await embedder.ask(EMBED, texts=[LONG])
    assert same(answer["embeddings"]["float"], await embedder.vectors(input=LONG, truncate_prompt_tokens=-1))
    error = await embedder.refusal(EMBED, texts=[LONG], truncate="NONE")
    assert error["code"] == "context_length_exceeded"
    error = await embedder.refusal(EMBED, texts=["x"], output_dimension=8)
    assert "does not support Matryoshka embeddings" in error["message"]


# -- score, rerank and pooling


async def test_an_embedder_scores_by_the_angle_of_its_vectors(embedder: Pooled):
    soup, bread, train = await embedder.vectors(input=[SOUP, BREAD, TRAIN])
    answer = await embedder.ask("/v1/score", text_1=SOUP, text_2=[BREAD, TRAIN])
    assert same([row["score"] for row in answer["data"]], [soup @ bread, soup @ train], 1e-4)
    ranked = await embedder.ask(RERANK, query=SOUP, documents=[TRAIN, BREAD])
    assert [row["index"] for row in ranked["results"]] == [1, 0]


async def test_pooling_gives_what_the_models_own_endpoint_gives(embedder: Pooled):
    vectors = await embedder.ask("/pooling", input=[SOUP, TRAIN])
    assert same([row["data"] for row in vectors["data"]], await embedder.vectors(input=[SOUP, TRAIN]))


async def test_a_task_that_the_model_has_not_is_refused(embedder: Pooled):
    error = await embedder.refusal("/pooling", input=SOUP, task="classify")
    assert error["param"] == "task"
    assert "'embed'" in error["message"]


# -- the wrong endpoint


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/generate"])
async def test_a_model_that_writes_nothing_says_what_it_answers(embedder: Pooled, path: str):
    error = await embedder.refusal(path, status=404, messages=[], input="x")
    assert error["code"] == "endpoint_not_supported"
    assert f"does not answer {path}; it answers " in error["message"]
    assert "/pooling" in error["message"]


async def test_an_embedder_names_its_own_endpoints(embedder: Pooled):
    said = (await embedder.refusal("/classify", status=404, input="x"))["message"]
    assert said.endswith("it answers /v1/embeddings, /v2/embed, /score, /rerank, /pooling.")


# -- by handle


async def test_handles_embed(embedder: Pooled):
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


async def test_handles_score_and_rank(embedder: Pooled):
    answer = await told(embedder.server.score(ScoreRequest(text_1=SOUP, text_2=[TRAIN, BREAD])))
    assert isinstance(answer, ScoreResponse)
    assert np.argmax([row["score"] for row in answer.data]) == 1
    asked = RerankRequest(query=SOUP, documents=[TRAIN, BREAD], top_n=1)
    ranked = await told(embedder.server.rerank(asked))
    assert isinstance(ranked, RerankResponse)
    assert [row["document"]["text"] for row in ranked.results] == [BREAD]


async def test_handles_are_told_what_is_wrong(embedder: Pooled):
    other = await told(embedder.server.classify({"input": "x"}))
    assert isinstance(other, ErrorResponse)
    assert other.error.code == "endpoint_not_supported"
    long = await told(embedder.server.rerank({"query": LONG, "documents": [BREAD]}))
    assert long.error.code == "context_length_exceeded"
    unknown = await told(embedder.server.pooling({"input": "x", "model": "nobody"}))
    assert unknown.error.code == "model_not_found"
    adapted = await told(embedder.server.embeddings({"input": "x", "model": f"{MODEL_ID}:a"}))
    assert "no lora_config" in adapted.error.message
    talk = {"messages": [], "max_tokens": 1, "model": f"{MODEL_ID}:a"}
    assert (await told(embedder.server.messages(talk))).type == "error"  # Anthropic's form


# -- rows of a batch


@pytest.mark.parity("D6")
async def test_a_row_is_embedded_from_text_ids_or_messages(embedder: Pooled):
    (expected,) = await embedder.vectors(input=SOUP)
    ids = np.array(await embedder.tokens(SOUP))
    said = [{"role": "user", "content": SOUP}]
    for fields in ({"input": SOUP}, {"prompt": SOUP}, {"tokenized_prompt": ids}, {"messages": said}):
        found = await row(embedder, Task("embed"), **fields, add_special_tokens="messages" in fields or None)
        assert found["error"] is None
        assert same(found["embeddings"], expected)
        assert found["num_input_tokens"] == len(ids)


@pytest.mark.parity("D6", "D11")
async def test_a_row_that_the_model_cannot_read_is_an_error(embedder: Pooled):
    long = await row(embedder, Task("embed"), input=LONG)
    assert long["error"]["code"] == "context_length_exceeded"
    other = await row(embedder, Task("classify"), input="x")
    assert (other["error"]["code"], other["error"]["status"]) == ("endpoint_not_supported", 404)
