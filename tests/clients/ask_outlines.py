"""outlines: chat, stream, model, choice, regex and grammar, and an unknown model's error."""

from typing import Literal

import outlines
import pytest
from openai import OpenAI
from outlines.exceptions import NotFoundError
from outlines.inputs import Chat
from pydantic import BaseModel

WEATHER = "What is the weather in Paris?"


class Sky(BaseModel):
    city: Literal["Paris"]
    sky: Literal["sunny", "rainy"]


for connect in (outlines.from_openai, outlines.from_vllm):
    model = connect(OpenAI(), "assistant")
    assert model("What is 2 + 3?", temperature=0) == "The sum is 5."
    turns = Chat([{"role": "user", "content": "What is 2 + 3?"}])
    pieces = list(model.stream(turns, temperature=0))
    assert "".join(pieces) == "The sum is 5.", pieces
    assert Sky.model_validate_json(model(WEATHER, Sky))
    with pytest.raises(NotFoundError, match="'nobody' is not served here"):
        connect(OpenAI(), "nobody")(WEATHER)

assert model(WEATHER, Literal["sunny", "rainy"]) in ("sunny", "rainy")
assert model(WEATHER, outlines.regex("[a-c]{3}")).strip("abc") == ""
assert model(WEATHER, outlines.cfg('root ::= "yes" | "no"')) in ("yes", "no")
