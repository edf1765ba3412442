"""LiteLLM: chat with reasoning, a rebuilt stream, a tool loop, Responses, embeddings, an error."""

import os

import litellm
import pytest

COMMON = {"api_base": os.environ["OPENAI_BASE_URL"], "temperature": 0}
ASSISTANT = "hosted_vllm/assistant"
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]

said = litellm.completion(ASSISTANT, SUM, **COMMON).choices[0].message
assert (said.content, said.reasoning_content) == ("The sum is 5.", "2 plus 3 makes 5."), said

stream = litellm.completion(ASSISTANT, SUM, stream=True, stream_options={"include_usage": True}, **COMMON)
whole = litellm.stream_chunk_builder(list(stream), messages=SUM)
assert whole.choices[0].message.content == "The sum is 5.", whole
assert whole.usage.completion_tokens > 5, whole

turns = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = litellm.completion(ASSISTANT, turns, tools=TOOLS, **COMMON).choices[0].message
(call,) = asked.tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}'), call
turns += [asked, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
said = litellm.completion(ASSISTANT, turns, tools=TOOLS, **COMMON).choices[0].message.content
assert said == "It is sunny in Paris.", said

response = litellm.responses("What is 2 + 3?", ASSISTANT, **COMMON)
assert response.output_text == "The sum is 5.", response

rows = litellm.embedding("hosted_vllm/embedder", ["one", "two"], api_base=COMMON["api_base"]).data
assert len({len(row["embedding"]) for row in rows}) == 1, rows

with pytest.raises(litellm.NotFoundError, match="'nobody' is not served here"):
    litellm.completion("hosted_vllm/nobody", SUM, **COMMON)
