"""The simulator answers in the form that vLLM's schema has for a request, or refuses it with a sentence."""

from __future__ import annotations

import pytest
from served import Served

pytestmark = pytest.mark.parity("X16")


async def simulated(served: Served, **options) -> Served:
    await served.gateway("m")
    await served.replica(**options)
    return served


async def test_clients_that_ask_for_base64_read_the_same_vectors(served: Served):
    client = (await simulated(served)).openai()
    packed = await client.embeddings.create(model="m", input="Hello there")  # base64 unless told otherwise
    plain = await client.embeddings.create(model="m", input="Hello there", encoding_format="float")
    assert len(plain.data[0].embedding) == 64
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-7)


async def test_token_ids_are_embedded_like_their_text(served: Served):
    async with (await simulated(served)).http() as http:
        ids = [
            (await http.post("/tokenize", json={"prompt": text})).json()["tokens"]
            for text in ("one two", "x")
        ]
    answers = [
        await served.openai().embeddings.create(model="m", input=given, encoding_format="float")
        for given in (["one two", "x"], ids, ids[0])
    ]
    texts, lists, one = ([item.embedding for item in answer.data] for answer in answers)
    assert texts == lists
    assert one == texts[:1]
    assert answers[0].usage == answers[1].usage


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": "x", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        ("/v1/embeddings", {"input": ["x", 1]}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
    ],
)
async def test_what_is_not_simulated_is_refused(served: Served, path: str, body: dict, param: str):
    async with (await simulated(served)).http() as http:
        answer = await http.post(path, json={"model": "m", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
