"""OpenAI's Agents SDK: a tool loop, continued history, a stream, an output type, an error."""

import asyncio
from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI, NotFoundError
from pydantic import BaseModel

WEATHER = "What is the weather in Paris?"


class Sky(BaseModel):
    city: Literal["Paris"]
    sky: Literal["sunny", "rainy"]


@function_tool
def get_weather(city: str) -> str:
    return {"Paris": "sunny"}[city]


async def main() -> None:
    client = AsyncOpenAI(max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        common = {"name": "weather", "model_settings": ModelSettings(temperature=0)}
        agent = Agent(model=kind("assistant", client), tools=[get_weather], **common)
        result = await Runner.run(agent, WEATHER)
        assert result.final_output == "It is sunny in Paris.", result
        again = [*result.to_input_list(), {"role": "user", "content": "What is 2 + 3?"}]
        said = (await Runner.run(agent, again)).final_output
        # The tiny model cannot add after it called a tool.
        assert said.startswith("The sum is "), said

        streamed = Runner.run_streamed(agent, WEATHER)
        deltas = [event async for event in streamed.stream_events() if event.type == "raw_response_event"]
        text = "".join(getattr(e.data, "delta", "") for e in deltas if "output_text" in e.data.type)
        assert text == streamed.final_output == "It is sunny in Paris.", (text, streamed.final_output)

        shaped = Agent(model=kind("assistant", client), output_type=Sky, **common)
        assert isinstance((await Runner.run(shaped, WEATHER)).final_output, Sky)
        with pytest.raises(NotFoundError, match="'nobody' is not served here"):
            await Runner.run(Agent(model=kind("nobody", client), **common), WEATHER)


asyncio.run(main())
