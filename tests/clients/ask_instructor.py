"""instructor: objects by tool calls, by a schema and over Responses, a partial stream, an error."""

from typing import Literal

import instructor
import pytest
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

TURNS = [{"role": "user", "content": "What is the weather in Paris?"}]


class Sky(BaseModel):
    city: Literal["Paris"]
    sky: Literal["sunny", "rainy"]


for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    sky = client.create(model="assistant", messages=TURNS, response_model=Sky, max_retries=0)
    assert isinstance(sky, Sky), (mode, sky)

client = instructor.from_openai(OpenAI(), mode=Mode.TOOLS)
parts = list(client.create_partial(model="assistant", messages=TURNS, response_model=Sky, temperature=0))
assert len(parts) > 1, parts
assert parts[-1].city == "Paris", parts
with pytest.raises(InstructorRetryException, match="'nobody' is not served here"):
    client.create(model="nobody", messages=TURNS, response_model=Sky, max_retries=0)
