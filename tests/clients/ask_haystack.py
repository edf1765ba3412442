"""Haystack: chat and Responses generators, an agent with a tool, streams, both embedders, an error."""

import os
from typing import Annotated

import pytest
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document
from haystack.tools import tool
from openai import NotFoundError

URL = os.environ["OPENAI_BASE_URL"]
WEATHER = [ChatMessage.from_user("What is the weather in Paris?")]


@tool
def get_weather(city: Annotated[str, "the city"]) -> str:
    """Weather of a city."""
    return {"Paris": "sunny"}[city]


pieces = []
for kind in (OpenAIChatGenerator, OpenAIResponsesChatGenerator):
    common = {"api_base_url": URL, "generation_kwargs": {"temperature": 0}, "max_retries": 0}
    generator = kind(model="assistant", **common)
    (reply,) = generator.run([ChatMessage.from_user("What is 2 + 3?")])["replies"]
    assert reply.text == "The sum is 5.", reply

    for callback in (None, lambda piece: pieces.append(piece.content)):
        agent = Agent(chat_generator=generator, tools=[get_weather], streaming_callback=callback)
        assert agent.run(messages=WEATHER)["last_message"].text == "It is sunny in Paris."
    with pytest.raises(NotFoundError, match="'nobody' is not served here"):
        kind(model="nobody", **common).run(WEATHER)
assert "".join(pieces).count("It is sunny in Paris.") == 2, pieces

documents = OpenAIDocumentEmbedder(model="embedder", api_base_url=URL).run([Document(content="one")])[
    "documents"
]
query = OpenAITextEmbedder(model="embedder", api_base_url=URL).run("one")["embedding"]
assert max(abs(a - b) for a, b in zip(documents[0].embedding, query, strict=True)) < 1e-5
