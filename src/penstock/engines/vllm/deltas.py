"""Converts between `generate` and vLLM: sampling parameters in, deltas out.

Importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_type_hints

import msgspec
from vllm.logprobs import Logprob as Candidate
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from penstock.engine import Delta, Logprob
from penstock.errors import BadRequest, Error
from penstock.openai.errors import unreadable


def sampling(params: Mapping[str, Any]) -> SamplingParams:
    """vLLM's SamplingParams from what users write, where `structured_outputs` may be a plain dict.

    vLLM checks no types here, and its core cannot decode a wrong one.
    Raises: BadRequest for an unknown parameter or a wrong type; what vLLM raises for values that it rejects.
    """
    values: dict[str, Any] = dict(params)
    if unknown := [name for name in values if name not in _TYPES]:
        raise BadRequest(f"'{unknown[0]}' is no sampling parameter of vLLM.", param=unknown[0])
    if isinstance(given := values.get("structured_outputs"), Mapping):
        values["structured_outputs"] = StructuredOutputsParams(**given)
    try:
        typed = msgspec.convert(values, _Typed, str_keys=True)
    except msgspec.ValidationError as error:
        raise unreadable(error) from error
    values = {name: getattr(typed, name) for name in values}
    values["output_kind"] = RequestOutputKind.DELTA
    return SamplingParams(**values)


_INTERNAL = frozenset(
    {"output_text_buffer_length", "prompt_logprob_start", "prompt_logprob_token_ids", "skip_clone"}
)
"""Fields internal to vLLM, or that no delta would show."""

_TYPES = {
    name: kind
    for name, kind in get_type_hints(SamplingParams).items()
    if not name.startswith("_") and name not in _INTERNAL
}
_Typed = msgspec.defstruct(
    "SamplingParams", [(name, kind | msgspec.UnsetType, msgspec.UNSET) for name, kind in _TYPES.items()]
)
"""What the core decodes, without the checks and defaults of vLLM's own class."""


def deltas(output: RequestOutput) -> Iterator[Delta]:
    """One for each output that a step extended. Raises: Error when the engine failed on it."""
    prompt_tokens, cached_tokens = len(output.prompt_token_ids or ()), output.num_cached_tokens or 0
    for one in output.outputs:
        if one.finish_reason == "error":
            raise Error("The engine failed while it made this answer.")
        yield Delta(
            one.text,
            tuple(one.token_ids),
            one.index,
            one.finish_reason,
            prompt_tokens,
            cached_tokens,
            _logprobs(one) if one.logprobs is not None else None,
        )


def _logprobs(one: CompletionOutput) -> tuple[tuple[Logprob, ...], ...]:
    found = zip(one.token_ids, one.logprobs or (), strict=False)
    return tuple(tuple(_in_order(token_id, candidates or {})) for token_id, candidates in found)


def _in_order(token_id: int, candidates: Mapping[int, Candidate]) -> Iterator[Logprob]:
    """The sampled token first, then the likeliest others."""
    for each, found in sorted(candidates.items(), key=lambda item: (item[0] != token_id, item[1].rank or 0)):
        yield Logprob(each, found.logprob, found.rank, found.decoded_token)
