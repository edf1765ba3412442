"""The official client, through gateway, listener and simulator."""

import openai
import pytest
from served import Served, chat


@pytest.mark.parity("S11")
async def test_chat_answers(served: Served):
    await served.gateway("m")
    await served.replica(reply="water turns wheels")
    answer = await served.openai().chat.completions.create(**chat())
    assert answer.choices[0].message.content == "water turns wheels"


@pytest.mark.parity("S11")
async def test_stream_gives_the_same_text_in_pieces(served: Served):
    await served.gateway("m")
    await served.replica(reply="water turns wheels")
    stream = await served.openai().chat.completions.create(**chat(stream=True))
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == "water turns wheels"
    assert len(pieces) > 3


async def test_completions_and_embeddings_take_the_same_way(served: Served):
    await served.gateway("m")
    await served.replica(reply="yes")
    client = served.openai()
    completion = await client.completions.create(model="m", prompt="well?")
    embedding = await client.embeddings.create(model="m", input="well?", encoding_format="float")
    assert completion.choices[0].text == "yes"
    assert len(embedding.data[0].embedding) == 64


@pytest.mark.parity("S15")
async def test_models_are_listed_with_their_context_window(served: Served):
    await served.gateway("a", "org/b:v1")
    await served.replica("org/b:v1", max_model_len=512)
    models = (await served.openai().models.list()).data
    assert [(model.id, model.created, model.owned_by) for model in models] == [
        ("a", 1, "penstock"),
        ("org/b:v1", 1, "penstock"),
    ]
    assert [model.model_dump()["max_model_len"] for model in models] == [None, 512]


async def test_a_model_with_slash_and_colon_is_shown_and_asked(served: Served):
    await served.gateway("a", "org/b:v1")
    await served.replica("org/b:v1", reply="here")
    client = served.openai()
    assert (await client.models.retrieve("org/b:v1")).id == "org/b:v1"
    answer = await client.chat.completions.create(**chat() | {"model": "org/b:v1"})
    assert answer.choices[0].message.content == "here"


async def test_unknown_model_is_not_found_and_the_known_ones_are_named(served: Served):
    await served.gateway("a", "b")
    with pytest.raises(openai.NotFoundError) as raised:
        await served.openai().chat.completions.create(**chat() | {"model": "c"})
    assert raised.value.code == "model_not_found"
    assert raised.value.type == "invalid_request_error"
    assert "'a', 'b'" in raised.value.message


async def test_an_error_of_the_engine_reaches_the_client_as_it_is(served: Served):
    await served.gateway("m")
    await served.replica(max_model_len=4)
    with pytest.raises(openai.BadRequestError) as raised:
        await served.openai().chat.completions.create(**chat("one two three four five six"))
    assert raised.value.code == "context_length_exceeded"
