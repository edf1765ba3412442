"""An outcome as columns of the output: one schema per task, the same for failed rows.

Names are those of Ray Data LLM where it has them. What an engine does not report is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pyarrow as pa

from penstock.data.results.outcome import Outcome, bad_answer
from penstock.data.results.responses import (
    DECODERS,
    Classification,
    Embedding,
    GenerationResult,
    Logprobs,
    PairScore,
    PooledResult,
    PromptToken,
    ResponseChoice,
    ResponseUsage,
)
from penstock.data.rows.request import Kind, Task

Columns = dict[str, Any]

_TOP_LOGPROBS = pa.list_(pa.struct({"token": pa.string(), "logprob": pa.float64()}))
_LOGPROBS = pa.list_(
    pa.struct(
        {"token": pa.string(), "token_id": pa.int64(), "logprob": pa.float64(), "top_logprobs": _TOP_LOGPROBS}
    )
)
_PROMPT_LOGPROBS = pa.list_(
    pa.list_(
        pa.struct({"token_id": pa.int64(), "token": pa.string(), "logprob": pa.float64(), "rank": pa.int64()})
    )
)
_TOOL_CALLS = pa.list_(pa.struct({"id": pa.string(), "name": pa.string(), "arguments": pa.string()}))
_IDS = pa.list_(pa.int64())
_OUTPUTS = pa.list_(
    pa.struct(
        {
            "text": pa.string(),
            "token_ids": _IDS,
            "finish_reason": pa.string(),
            "reasoning": pa.string(),
            "tool_calls": _TOOL_CALLS,
            "logprobs": _LOGPROBS,
        }
    )
)
ERROR = pa.struct(
    {
        "code": pa.string(),
        "message": pa.string(),
        "stage": pa.string(),
        "attempts": pa.int64(),
        "status": pa.int64(),
    }
)
"""The type of every error column."""

COMMON = {
    "num_input_tokens": pa.int64(),
    "time_taken_llm": pa.float64(),
    "waited_s": pa.float64(),
    "attempts": pa.int64(),
    "error": ERROR,
}
"""Columns of all tasks."""

_BY_KIND: Mapping[Kind, Mapping[str, pa.DataType]] = {
    "generate": {
        "generated_text": pa.string(),
        "generated_texts": pa.list_(pa.string()),
        "generated_tokens": _IDS,
        "finish_reason": pa.string(),
        "finish_reasons": pa.list_(pa.string()),
        "reasoning": pa.string(),
        "refusal": pa.string(),
        "tool_calls": _TOOL_CALLS,
        "logprobs": _LOGPROBS,
        "prompt_logprobs": _PROMPT_LOGPROBS,
        "outputs": _OUTPUTS,
        "prompt_token_ids": _IDS,
        "num_cached_tokens": pa.int64(),
        "num_generated_tokens": pa.int64(),
    },
    "embed": {"embeddings": pa.list_(pa.float32())},
    "classify": {
        "label": pa.string(),
        "probs": pa.list_(pa.float64()),
        "embeddings": pa.list_(pa.float32()),  # `probs` again, under the name of Ray Data LLM
    },
    "score": {"score": pa.float64(), "scores": pa.list_(pa.float64())},
}


ANSWERS: Mapping[Kind, str] = {
    "generate": "generated_text",
    "embed": "embeddings",
    "classify": "label",
    "score": "score",
}
"""The one column that users mean by the answer."""


def result_schema(task: Task) -> Any:  # pyarrow has no types
    """A `pyarrow.Schema`: names and types of the result columns, all nullable."""
    return pa.schema({**_BY_KIND[task.kind], **COMMON})


_EMPTY: dict[Kind, Columns] = {kind: dict.fromkeys([*fields, *COMMON]) for kind, fields in _BY_KIND.items()}


def result_columns(task: Task, outcome: Outcome) -> Columns:
    """The values of all columns of the schema, in its order. Never raises.

    A failed row has only `error`, `attempts` and the times; a row that is ok has no `error`.
    """
    found: Columns = _EMPTY[task.kind] | common_columns(outcome)
    if outcome.state == "ok":
        try:
            response = DECODERS[task.kind].decode(outcome.body)
            prompt_tokens = response.usage.counts()[0] if response.usage else None
            found |= {"num_input_tokens": prompt_tokens, **_READ[task.kind](response)}
        except (msgspec.MsgspecError, ValueError, IndexError) as error:
            message = f"The response is not one of this endpoint: {error}."
            found["error"] = msgspec.structs.asdict(bad_answer(message, outcome.attempts))
    return found


def common_columns(outcome: Outcome) -> Columns:
    """The values of the columns of all tasks, except token counts."""
    failure = outcome.failure
    return {
        "time_taken_llm": outcome.took_s if outcome.state == "ok" else None,
        "waited_s": outcome.waited_s,
        "attempts": outcome.attempts,
        "error": None if failure is None else msgspec.structs.asdict(failure),
    }


def _generated(response: GenerationResult) -> Columns:
    choices = sorted(response.choices, key=lambda choice: choice.index)
    first = choices[0]
    usage = response.usage or ResponseUsage()
    prompt, cached, generated = usage.counts()
    prompt_ids = response.prompt_token_ids or first.prompt_token_ids
    prompt_logprobs = response.prompt_logprobs or first.prompt_logprobs
    counted = sum(len(choice.token_ids or ()) for choice in choices) or None
    outputs = [_output(choice) for choice in choices]
    return {
        "generated_text": outputs[0]["text"],
        "generated_texts": [output["text"] for output in outputs],
        "generated_tokens": first.token_ids,
        "finish_reason": first.finish_reason,
        "finish_reasons": [choice.finish_reason for choice in choices],
        "reasoning": outputs[0]["reasoning"],
        "refusal": first.message.refusal if first.message else None,
        "tool_calls": outputs[0]["tool_calls"],
        "logprobs": outputs[0]["logprobs"],
        "prompt_logprobs": None
        if prompt_logprobs is None
        else [_prompt_token(token) for token in prompt_logprobs],
        "outputs": outputs if len(outputs) > 1 else None,
        "prompt_token_ids": prompt_ids,
        "num_input_tokens": prompt if prompt is not None else len(prompt_ids) if prompt_ids else None,
        "num_cached_tokens": cached,
        "num_generated_tokens": generated if generated is not None else counted,
    }


def _output(choice: ResponseChoice) -> Columns:
    message = choice.message
    return {
        "text": choice.text or "" if message is None else _text(message.content),
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "reasoning": None if message is None else message.reasoning or message.reasoning_content,
        "tool_calls": None if message is None else _tool_calls(choice),
        "logprobs": _logprobs(choice.logprobs, choice.token_ids),
    }


def _text(content: Any) -> str:
    """The text of a content, which some servers give in parts; "" if none, as beside tool calls."""
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _tool_calls(choice: ResponseChoice) -> list[Columns] | None:
    calls = (choice.message and choice.message.tool_calls) or []
    return [
        {"id": call.id, "name": call.function.name, "arguments": _arguments(call.function.arguments)}
        for call in calls
        if call.function
    ] or None


def _arguments(value: Any) -> str | None:
    """JSON text, also where a server gives the object."""
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _logprobs(found: Logprobs | None, ids: list[int] | None) -> list[Columns] | None:
    if found is None:
        return None
    if found.content is not None:
        tokens = [
            (
                token.token,
                token.logprob,
                [msgspec.structs.asdict(other) for other in token.top_logprobs or ()],
            )
            for token in found.content
        ]
    else:
        tops = found.top_logprobs or [None] * len(found.tokens or ())
        logprobs = found.token_logprobs or [None] * len(tops)
        tokens = [
            (token, logprob, [{"token": other, "logprob": value} for other, value in (top or {}).items()])
            for token, logprob, top in zip(found.tokens or (), logprobs, tops, strict=False)
        ]
    known: list[int] | list[None] = ids if ids and len(ids) == len(tokens) else [None] * len(tokens)
    return [
        {"token": token, "token_id": token_id, "logprob": logprob, "top_logprobs": top}
        for (token, logprob, top), token_id in zip(tokens, known, strict=True)
    ]


def _prompt_token(found: dict[int, PromptToken] | None) -> list[Columns] | None:
    """vLLM's, for one prompt token: itself, then the likeliest others; None for the first token."""
    if found is None:
        return None
    return [
        {"token_id": token_id, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token_id, entry in found.items()
    ]


def _embedded(response: PooledResult[Embedding]) -> Columns:
    return {"embeddings": response.data[0].numbers()}


def _classified(response: PooledResult[Classification]) -> Columns:
    first = response.data[0]
    return {"label": first.label, "probs": first.probs, "embeddings": first.probs}


def _scored(response: PooledResult[PairScore]) -> Columns:
    scores = [pair.score for pair in response.data]
    return {"score": scores[0], "scores": scores}


_READ: Mapping[Kind, Callable[[Any], Columns]] = {
    "generate": _generated,
    "embed": _embedded,
    "classify": _classified,
    "score": _scored,
}
