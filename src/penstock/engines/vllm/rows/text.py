"""The text of an output from all of its tokens, equal to what vLLM's incremental detokenizer makes of them.

Importing this file imports vLLM.
"""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import ByteLevel
from transformers import TokenizersBackend
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

_TORN = "\N{REPLACEMENT CHARACTER}"
_TAIL = 8
"""Tokens of a prompt by which its end is judged: a character has up to four bytes, a token one at least."""


def decodes_at_once(tokenizer: Any) -> bool:
    """Whether the text of two token lists is that of their concatenation.

    Byte-level decoders join the bytes of tokens; others strip or replace what lies between two tokens.
    """
    fast: type[Any] = TokenizersBackend  # for others, vLLM's detokenizer is its own
    return isinstance(tokenizer, fast) and isinstance(tokenizer._tokenizer.decoder, ByteLevel)


class Texts:
    """Of outputs of one tokenizer, for which `decodes_at_once` holds."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._decode = tokenizer._tokenizer.decode  # not the public one, which copies and cleans up

    def of(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> str:
        """tokens: without the one that ended the output, if any."""
        skip = params.skip_special_tokens
        text: str = self._decode(tokens, skip)
        before: str = self._decode(prompt[-_TAIL:], skip)
        if _TORN in text or not before or before.endswith(_TORN):
            return self._step_by_step(prompt, tokens, params)
        return text

    def _step_by_step(self, prompt: list[int], tokens: list[int], params: SamplingParams) -> str:
        """Where characters are torn, what vLLM shows of them depends on each step."""
        request = EngineCoreRequest("", prompt, None, params, None, 0.0, None, None, None)
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        detokenizer.update(tokens, stop_terminated=False)
        return detokenizer.get_next_output_text(finished=True, delta=False)
