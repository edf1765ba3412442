"""What crosses between `generate` and vLLM: sampling parameters on their way in, deltas on their way out.

Importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from vllm import SamplingParams
from vllm.logprobs import Logprob as Candidate
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from penstock.engine import Delta, Logprob
from penstock.errors import BadRequest, Error


def sampling(params: Mapping[str, Any]) -> SamplingParams:
    """vLLM's own object from what users write, where `structured_outputs` may be a plain dict.

    Raises: BadRequest for what is no parameter; what vLLM raises for values that it refuses.
    """
    values: dict[str, Any] = dict(params)
    if unknown := [name for name in values if name.startswith("_") or name not in _NAMES]:
        raise BadRequest(f"'{unknown[0]}' is no sampling parameter of vLLM.", param=unknown[0])
    if isinstance(given := values.get("structured_outputs"), Mapping):
        values["structured_outputs"] = StructuredOutputsParams(**given)
    values["output_kind"] = RequestOutputKind.DELTA
    try:
        return SamplingParams(**values)
    except TypeError as error:
        raise _misfit(params) from error


def _misfit(params: Mapping[str, Any]) -> BadRequest:
    """vLLM compares before it looks at types; its pydantic form says which value is of the wrong one."""
    try:
        TypeAdapter(SamplingParams).validate_python(dict(params))
    except ValidationError as error:
        detail = error.errors()[-1]
        name = str(detail["loc"][1])
        return BadRequest(f"{name}: {detail['msg']}.", param=name)
    return BadRequest("A sampling parameter is of the wrong type.")


_NAMES = frozenset(SamplingParams.__struct_fields__)


def deltas(output: RequestOutput) -> Iterator[Delta]:
    """One for each output that a step added to. Raises: Error when the engine failed on it."""
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
    """The token that was taken, then the likeliest others."""
    for each, found in sorted(candidates.items(), key=lambda item: (item[0] != token_id, item[1].rank or 0)):
        yield Logprob(each, found.logprob, found.rank, found.decoded_token)
