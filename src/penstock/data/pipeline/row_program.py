"""A program per row: several calls of the model, in sequence or in parallel, for one row.

`async def program(row, llm)` returns the row's output as a dict. Its calls go through the same window as
other rows, which keep the engine busy meanwhile. Builds requests and reads responses; `send` sends them.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import pyarrow as pa

from penstock.data.results.columns import COMMON, common_columns, result_columns
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.rows.builder import build_request
from penstock.data.rows.coerce import to_json, type_name
from penstock.data.rows.request import Kind, RowRequest, Task
from penstock.errors import BadRequest, Error, OwnCodeFailed

log = logging.getLogger(__name__)

Send = Callable[[RowRequest], Awaitable[Outcome]]
Program = Callable[[dict[str, Any], "ProgramLLM"], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class LLMResponse:
    """The model's response. text: "" beside tool calls; texts: all outputs, if `n` requested several.

    token_ids, prompt_tokens, cached_tokens, generated_tokens: None if the engine does not report them.
    columns: all result columns by name (`logprobs`, `outputs`, ...).
    """

    text: str
    texts: list[str]
    finish_reason: str | None
    token_ids: list[int] | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    reasoning: str | None
    tool_calls: list[dict[str, Any]]
    columns: Mapping[str, Any] = field(repr=False)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to append before the next call."""
        if not self.tool_calls:
            return {"role": "assistant", "content": self.text}
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text or None, "tool_calls": calls}


@dataclass(frozen=True, slots=True)
class Label:
    """The most likely class, and the probabilities of all."""

    label: str | None
    probs: list[float]


class ProgramLLM:
    """The model, for one row's program. Calls may run in parallel (`asyncio.gather`).

    Parameters are fields of a row: `temperature`, `max_tokens`, `tools`, `response_format`, `model`, ...
    Raises, in each call: BadRequest for an invalid request; after the retries of a row, the error that the
        response means (PromptTooLong, Unavailable, DeadlineExceeded, ...), a `penstock.errors.Error`.
    """

    def __init__(self, send: Send, task: Task, defaults: Mapping[str, Any]) -> None:
        self._send, self._task, self._defaults = send, task, defaults
        self.totals = _Totals()

    async def chat(self, messages: str | list[Any], **params: Any) -> LLMResponse:
        """The next turn of a conversation; a string is a conversation of one message."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return _response(await self._call("generate", {"messages": messages, **params}))

    async def complete(self, prompt: str | list[int] | Mapping[str, Any], **params: Any) -> LLMResponse:
        """Continues a text, token ids, or an engine prompt; without a chat template."""
        return _response(await self._call("generate", {"prompt": prompt, **params}))

    async def embed(self, input: Any, **params: Any) -> list[float]:
        """The vector of one text."""
        return (await self._call("embed", {"input": input, **params}))["embeddings"]

    async def classify(self, input: Any, **params: Any) -> Label:
        found = await self._call("classify", {"input": input, **params})
        return Label(found["label"], found["probs"])

    async def score(self, text_1: Any, text_2: Any, **params: Any) -> list[float]:
        """A score for each pair of texts: 1:1, 1:N or N:N."""
        return (await self._call("score", {"text_1": text_1, "text_2": text_2, **params}))["scores"]

    async def _call(self, kind: Kind, fields: dict[str, Any]) -> dict[str, Any]:
        task = replace(self._task, kind=kind)
        defaults = self._defaults if kind == self._task.kind else {}
        outcome = await self._send(build_request(fields, task, defaults))
        found = result_columns(task, outcome)
        self.totals.add(outcome, found)
        if found["error"] is not None:
            raise Failure(**found["error"]).to_error()
        return found


_COUNTS = ("calls", "num_input_tokens", "num_cached_tokens", "num_generated_tokens")


class _Totals:
    """Sums over all calls of a row."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(_COUNTS, 0)
        self._attempts, self._deaths, self._waited_s = 1, 0, 0.0

    def add(self, outcome: Outcome, found: Mapping[str, Any]) -> None:
        self._attempts = max(self._attempts, outcome.attempts)
        self._deaths += outcome.deaths
        self._waited_s += outcome.waited_s
        for name, value in self.counts.items():
            self.counts[name] = value + (1 if name == "calls" else found.get(name) or 0)

    def outcome(self, **end: Any) -> Outcome:
        """The row's outcome, with what its calls took."""
        return Outcome(attempts=self._attempts, deaths=self._deaths, waited_s=self._waited_s, **end)


async def run_program(
    program: Program,
    row: Mapping[str, Any],
    send: Send,
    task: Task | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Outcome:
    """The row's outcome: what the program returned, or why it failed. Never raises.

    A Penstock error that the program does not catch is the row's failure; any other is `own_code_failed`.
    """
    llm, began_s = ProgramLLM(send, task or Task(), defaults or {}), time.monotonic()
    try:
        output = _checked_output(await _start(program, dict(row), llm))
    except OwnCodeFailed as error:
        failure = _user_code_failure(str(error))
    except Error as error:
        failure = Failure.from_error(error, "engine")
    except Exception as error:
        log.exception("A row's program failed.")
        failure = _user_code_failure(f"The program raised {type(error).__name__}: {error}")
    else:
        body = msgspec.Raw(msgspec.json.encode({"output": output, **llm.totals.counts}))
        return llm.totals.outcome(state="ok", body=body, took_s=time.monotonic() - began_s)
    return llm.totals.outcome(state="failed", failure=failure)


def program_schema() -> Any:  # pyarrow has no types
    """A `pyarrow.Schema` of the result columns, without those that the program returns."""
    return pa.schema({**dict.fromkeys(_COUNTS, pa.int64()), **COMMON})


def program_columns(outcome: Outcome) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the program returned, and all result columns of the schema, whatever the row's outcome."""
    found: dict[str, Any] = dict.fromkeys([*_COUNTS, *COMMON]) | common_columns(outcome)
    if outcome.state != "ok":
        return {}, found
    ran: dict[str, Any] = msgspec.json.decode(outcome.body)
    return ran.pop("output"), found | ran


def _start(program: Program, row: dict[str, Any], llm: ProgramLLM) -> Awaitable[Any]:
    coroutine: Any = program(row, llm)
    if not inspect.isawaitable(coroutine):
        raise OwnCodeFailed(
            f"The program returned {type_name(coroutine)} at once; write `async def program(row, llm)`."
        )
    return coroutine


def _checked_output(returned: Any) -> dict[str, Any]:
    if not isinstance(returned, Mapping):
        raise OwnCodeFailed(
            f"The program returned {type_name(returned)}; it must return a dict, the row's output."
        )
    try:
        return to_json(cast("Mapping[str, Any]", returned), "output")
    except BadRequest as error:
        raise OwnCodeFailed(f"The program returned what JSON cannot hold: {error}") from error


def _user_code_failure(message: str) -> Failure:
    return Failure(code=OwnCodeFailed.code, message=message, stage="postprocess")


def _response(found: Mapping[str, Any]) -> LLMResponse:
    return LLMResponse(
        text=found["generated_text"],
        texts=found["generated_texts"],
        finish_reason=found["finish_reason"],
        token_ids=found["generated_tokens"],
        prompt_tokens=found["num_input_tokens"],
        cached_tokens=found["num_cached_tokens"],
        generated_tokens=found["num_generated_tokens"],
        reasoning=found["reasoning"],
        tool_calls=found["tool_calls"] or [],
        columns=found,
    )
