"""What one HTTP request has asked of the engine, and ids and times that are the same where its answer is
continued. Importing this file imports vLLM.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
import uuid
from contextvars import ContextVar
from types import SimpleNamespace

from vllm import utils

from penstock.request_context import created, id_seed, record_tokens, tokens_before, tokens_so_far

_NAMING = ("vllm.entrypoints.", "vllm.parser.", "vllm.renderers.", "vllm.tool_parsers.")
_OPENAI = "vllm.entrypoints.openai"
_DATED = tuple(f"{_OPENAI}.{kind}.serving" for kind in ("chat_completion", "completion", "responses"))
_MESSAGES, _MISTRAL = "vllm.entrypoints.anthropic.serving", "vllm.parser.mistral"


class _Requests:
    """count: so far. ids: numbers of the ids in the answer."""

    def __init__(self) -> None:
        self.count = 0
        self.ids = itertools.count()


_running: ContextVar[_Requests | None] = ContextVar("_running", default=None)


def begin() -> None:
    """Call it in the context that all tasks of an HTTP request inherit."""
    if record_tokens.get() is not None or tokens_before.get() or tokens_so_far.get() is not None:
        _running.set(_Requests())


def count() -> None:
    """Call it for each request to the engine: of several, none can be continued. And once more for an answer
    whose tokens do not tell what its app makes of them.
    """
    if (answer := _running.get()) is None:
        begin()
        answer = _running.get()
    if answer is not None:
        answer.count += 1


def requests() -> int:
    """How many requests the running answer is made of, so far; -1 for one that nobody can continue."""
    return answer.count if (answer := _running.get()) is not None else -1


def unique() -> str:
    """16 random hexadecimal digits, the same ones in an answer that is continued."""
    answer, seed = _running.get(), id_seed.get()
    if answer is None or not seed:
        return uuid.uuid4().hex[:16]
    return hashlib.sha256(f"{seed} {next(answer.ids)}".encode()).hexdigest()[:16]


def name_by_seed() -> None:
    """Has vLLM take its ids and times from here: changes the modules that are imported, the model's parsers
    among them. Idempotent.
    """
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
