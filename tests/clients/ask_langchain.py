"""LangChain: chat and Responses, streams, a tool loop, structured output, a vector store, an error."""

from typing import Literal

import pytest
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import NotFoundError
from pydantic import BaseModel

WEATHER = "What is the weather in Paris?"


class Place(BaseModel):
    """Weather of a city."""

    city: Literal["Paris"]  # one field only: after a second one a small model may write blanks for ever


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return {"Paris": "sunny"}[city]


for responses in (False, True):
    chat = ChatOpenAI(model="assistant", temperature=0, max_retries=0, use_responses_api=responses)
    assert chat.invoke("What is 2 + 3?").text == "The sum is 5."
    assert "".join(piece.text for piece in chat.stream("What is 2 + 3?")) == "The sum is 5."

    agent = chat.bind_tools([get_weather])
    turns = [("user", WEATHER), agent.invoke(WEATHER)]
    turns += [get_weather.invoke(call) for call in turns[-1].tool_calls]
    assert agent.invoke(turns).text == "It is sunny in Paris."
    for method in ("json_schema", "function_calling"):
        assert isinstance(chat.with_structured_output(Place, method=method).invoke(WEATHER), Place)
    with pytest.raises(NotFoundError, match="'nobody' is not served here"):
        ChatOpenAI(model="nobody", max_retries=0, use_responses_api=responses).invoke(WEATHER)

embedder = OpenAIEmbeddings(model="embedder", check_embedding_ctx_length=False)
store = InMemoryVectorStore.from_texts(["the soup tastes salty", "the train departs"], embedder)
(found,) = store.similarity_search("a chef bakes bread", k=1)
assert found.page_content == "the soup tastes salty", found
