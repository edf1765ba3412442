"""The ids and times in vLLM's answers: the same ones in an answer that is continued. Imports vLLM."""

from __future__ import annotations

import sys
import time
import uuid
from types import SimpleNamespace

from vllm import utils

from penstock.engines.vllm.continued.answer import unique
from penstock.request_context import created

_NAMING = ("vllm.entrypoints.", "vllm.parser.", "vllm.renderers.", "vllm.tool_parsers.")
_OPENAI = "vllm.entrypoints.openai"
_DATED = tuple(f"{_OPENAI}.{kind}.serving" for kind in ("chat_completion", "completion", "responses"))
_MESSAGES, _MISTRAL = "vllm.entrypoints.anthropic.serving", "vllm.parser.mistral"


def name_by_seed() -> None:
    """Changes the modules that are imported, the model's parsers among them. Idempotent."""
    for name, module in list(sys.modules.items()):
        found = vars(module)
        if name.startswith(_NAMING) and found.get("random_uuid") is utils.random_uuid:
            found["random_uuid"] = unique
        if name in _DATED and found.get("time") is time:
            found["time"] = SimpleNamespace(time=lambda: created.get() or time.time())
        if name == _MESSAGES and found.get("uuid") is uuid:
            found["uuid"] = SimpleNamespace(uuid4=lambda: uuid.UUID(unique() + unique()))
        if name == _MISTRAL:
            module.MistralToolCall.generate_random_id = staticmethod(lambda: unique()[:9])
