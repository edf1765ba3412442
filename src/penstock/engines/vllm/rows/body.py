"""The JSON of a response, as vLLM's OpenAI layer writes it.

vLLM itself makes one response of each endpoint, to a sample, when an engine starts. Later ones are this one
with other values in the places that depend on the output. Importing this file imports vLLM.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput

from penstock.engines.vllm.rows.plain import Plain

Fields = dict[str, Any]

_encode = msgspec.json.Encoder().encode


class BodyWriter:
    """Bodies of one endpoint. sample: vLLM's response to `_SAMPLE`."""

    def __init__(self, sample: Fields) -> None:
        self._sample = sample
        (self._choice,) = sample["choices"]
        self._details: Fields | None = sample["usage"]["prompt_tokens_details"]

    def of(self, response_id: str, plain: Plain, output: RequestOutput, text: str) -> bytes:
        """output: the last one of the request."""
        (one,), prompt = output.outputs, output.prompt_token_ids or []
        told = plain.return_token_ids is True
        choice = self._choice | {
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
            "token_ids": one.token_ids if told else None,
        }
        whole = self._sample | {
            "id": response_id,
            "created": int(time.time()),
            "choices": [choice],
            "usage": self._usage(output, len(prompt), len(one.token_ids)),
        }
        if "message" in choice:
            choice["message"] = choice["message"] | {"content": text}
        else:
            choice["text"] = text
        (whole if "prompt_token_ids" in whole else choice)["prompt_token_ids"] = prompt if told else None
        return _encode(whole)

    def _usage(self, output: RequestOutput, prompt: int, made: int) -> Fields:
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        return self._sample["usage"] | counts | {"prompt_tokens_details": self._prompt_details(output)}

    def _prompt_details(self, output: RequestOutput) -> Fields | None:
        if self._details is None:
            return None
        known = {
            "cached_tokens": output.num_cached_tokens,
            "created_cache_tokens": output.num_cache_creation_tokens,
        }
        return self._details | {name: known[name] for name in known if self._details.get(name) is not None}


async def chat_body(serving: Any) -> BodyWriter:
    """serving: vLLM's OpenAIServingChat."""

    async def outputs() -> AsyncIterator[RequestOutput]:
        yield _sample()

    request = ChatCompletionRequest.model_validate({"messages": []})
    name = serving.models.model_name(None)
    metadata = RequestResponseMetadata(request_id="")
    made = await serving.chat_completion_full_generator(
        request, outputs(), "", name, [], serving.renderer.tokenizer, metadata
    )
    return BodyWriter(made.model_dump())


def completion_body(serving: Any) -> BodyWriter:
    """serving: vLLM's OpenAIServingCompletion."""
    request = CompletionRequest.model_validate({"prompt": "any"})
    name, metadata = serving.models.model_name(None), RequestResponseMetadata(request_id="")
    made = serving.request_output_to_completion_response(
        [_sample()], request, "", 0, name, serving.renderer.tokenizer, metadata
    )
    return BodyWriter(made.model_dump())


def _sample() -> RequestOutput:
    """With a number in each place that a response may show."""
    one = CompletionOutput(0, "", [0], None, None, finish_reason="length")
    return RequestOutput(
        "", None, [0], None, [one], finished=True, num_cached_tokens=1, num_cache_creation_tokens=1
    )
