"""Your own code around a model: a preprocessor before the engine, a postprocessor behind it, in its replicas.

What the preprocessor returns is what the engine's `generate` gets. The client notices nothing: any endpoint,
streamed or not. Ask "What is PS?" with any OpenAI client.
"""

import re
from typing import Any

from ray import serve

from penstock.serve import LLMConfig, LLMRouter

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Abbreviations:
    """Writes out the abbreviations in a question."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def __call__(self, request: dict[str, Any], context: Any) -> Any:
        question = request["messages"][-1]["content"]
        if len(question) > 200:
            raise ValueError("Ask in 200 characters at most.")  # a 400 with this text
        asked = re.sub(r"\w+", lambda word: self.known.get(word[0], word[0]), question)
        context.notes["asked"] = asked
        return {"prompt": PROMPT.format(asked)}, {"temperature": 0}  # or the request, edited


def tell(answer: dict[str, Any], context: Any) -> dict[str, Any]:
    """Of a stream it gets every event."""
    return {**answer, "asked": context.notes["asked"]}


config = LLMConfig(
    model_loading_config={"model_id": "helper", "model_source": "demo"},
    preprocessor=Abbreviations,  # or its path, "my_module:Abbreviations", as in YAML
    preprocessor_options={"arguments": {"known": {"PS": "Penstock"}}},
    postprocessor=tell,
)
serve.run(LLMRouter.as_deployment().bind([config]))
