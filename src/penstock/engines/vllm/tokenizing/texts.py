"""Limits on texts that vLLM tokenizes.

vLLM tokenizes a text that is to be truncated whole. Here it is cut first to what can matter, and a text that
no context can hold is refused. Importing this file imports vLLM.

Work-around for vLLM 0.32. Remove when it limits what it tokenizes for a truncated prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

from penstock.engines.vllm.tokenizing.turns import LONG, take_turns

MOST_TEXT = 1 << 20
MOST_PER_TOKEN = 16
"""Characters of a text, for each token of the context; `MOST_TEXT` if that is more."""

_apply: Any = TokenizeParams.apply_pre_tokenization


def limit_texts(renderer: Any) -> None:
    """Limits what vLLM tokenizes from now on; this renderer serves requests in turns."""
    TokenizeParams.apply_pre_tokenization = _apply_to_fitted
    media = renderer.mm_processor is not None and renderer.model_config.runner_type == "pooling"
    apart = isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin) and not media
    take_turns(renderer._executor, apart)  # poolers process media there, too, with a cache for one thread


def limit_scores(state: Any) -> None:
    """Limits the texts of pairs, which vLLM tokenizes together. state: of vLLM's app."""
    if (serving := getattr(state, "serving_scores", None)) is None:
        return
    processor: Any = serving.io_processor
    read = processor.valid_inputs_online

    def fitted(request: Any) -> Any:
        params: TokenizeParams = request.build_tok_params(processor.model_config)
        limits = processor._get_token_limits(request=request)
        data = read(request)
        query, document = (
            replace(params, truncate_prompt_tokens=tokens, truncation_side="right") if tokens else params
            for tokens in limits
        )
        data.data_1 = [_fit_part(part, query, processor.tokenizer) for part in data.data_1]
        data.data_2 = [_fit_part(part, document, processor.tokenizer) for part in data.data_2]
        return data

    processor.valid_inputs_online = fitted


def _fit_part(part: Any, params: TokenizeParams, tokenizer: Any) -> Any:
    """part: a text, or what else is scored."""
    return fit(part, params, tokenizer) if isinstance(part, str) else part


def _apply_to_fitted(self: TokenizeParams, tokenizer: Any, prompt: Any) -> Any:
    if tokenizer is not None:
        prompt["prompt"] = fit(prompt["prompt"], self, tokenizer)
    return _apply(self, tokenizer, prompt)


def fit(text: str, params: TokenizeParams, tokenizer: Any) -> str:
    """The part of a text that can reach the model. Raises: VLLMValidationError if it is too long to tokenize.

    Keeps `LONG` characters more than the tokens that truncation keeps can have, so these stay the same. Of
    blanks in a row one counts: some tokenizers drop them.
    """
    if len(text) <= LONG:
        return text
    most = max(MOST_TEXT, MOST_PER_TOKEN * (params.max_input_tokens or 0))
    tokens = params.truncate_prompt_tokens
    if tokens is None or params.return_token_offsets:  # offsets count from the start of the whole text
        if len(text) > most:
            raise VLLMValidationError(
                f"This model's maximum context length is {params.max_total_tokens} tokens. A text in the "
                f"request has {len(text):,} characters; {most:,} are allowed."
            )
        return text
    if tokens < 0:
        tokens = params.max_truncation_tokens or 0
    left = (params.truncation_side or tokenizer.truncation_side) == "left"
    text = text[-most:] if left else text[:most]
    blanks = len(text) - len(" ".join(text.split()))
    kept = blanks + LONG + tokens * tokenizer.max_chars_per_token
    return text[-kept:] if left else text[:kept]
