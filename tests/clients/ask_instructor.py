"""instructor: objects by tool calls, by a schema and over Responses, a partial stream, an error."""

from typing import Literal

import instructor
import pytest
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel

TURNS = [{"role": "user", "content": "What is the weather in Paris?"}]


class Place(BaseModel):
    city: Literal["Paris"]  # one field only: after a second one a small model may write blanks for ever


for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    client = instructor.from_openai(OpenAI(), mode=mode)
    place = client.create(model="assistant", messages=TURNS, response_model=Place, max_retries=0)
    assert isinstance(place, Place), (mode, place)

client = instructor.from_openai(OpenAI(), mode=Mode.TOOLS)
parts = list(client.create_partial(model="assistant", messages=TURNS, response_model=Place, temperature=0))
assert len(parts) > 1, parts
assert parts[-1].city == "Paris", parts
with pytest.raises(InstructorRetryException, match="'nobody' is not served here"):
    client.create(model="nobody", messages=TURNS, response_model=Place, max_retries=0)
