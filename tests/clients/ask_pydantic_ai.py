"""pydantic-ai: a tool loop, continued history, streams, both kinds of output, embeddings, an error."""

from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

WEATHER = "What is the weather in Paris?"


class Place(BaseModel):
    city: Literal["Paris"]  # one field only: after a second one a small model may write blanks for ever


def get_weather(city: str) -> str:
    return {"Paris": "sunny"}[city]


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    agent = Agent(kind("assistant"), tools=[get_weather], model_settings={"temperature": 0})
    result = agent.run_sync(WEATHER)
    assert result.output == "It is sunny in Paris.", result
    again = agent.run_sync("What is 2 + 3?", message_history=result.all_messages())
    # The tiny model cannot add after it called a tool.
    assert again.output.startswith("The sum is "), again

    pieces = list(agent.run_stream_sync(WEATHER).stream_text(delta=True))
    assert "".join(pieces) == "It is sunny in Paris.", pieces

    for form in (NativeOutput, ToolOutput):
        shaped = Agent(kind("assistant"), output_type=form(Place)).run_sync(WEATHER)
        assert isinstance(shaped.output, Place), shaped
    with pytest.raises(ModelHTTPError, match="'nobody' is not served here"):
        Agent(kind("nobody")).run_sync(WEATHER)

rows = Embedder("openai:embedder").embed_documents_sync(["one", "two"]).embeddings
assert len({len(row) for row in rows}) == 1, rows
