"""Renders a plain request as vLLM's OpenAI layer would: chat template, tokenizer, limits, default parameters.

In each step vLLM's own code, except that nothing is validated again. Importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.inputs import EngineInput
from vllm.renderers import merge_kwargs
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import SamplingParams

from penstock.engines.vllm.rows.plain import PlainChat, PlainCompletion, parameters

TOKENS_AT_A_TIME = 256
"""The core sends so many together, as nobody reads along. Token counters lag by up to this."""

Prompt = tuple[EngineInput, SamplingParams]


def chat_prompts(serving: Any) -> Callable[[PlainChat], Prompt]:
    """Renders a chat; raises what vLLM raises for one that it refuses. serving: vLLM's OpenAIServingChat."""
    blank = ChatCompletionRequest.model_validate({"messages": []})
    template: Any = serving.online_renderer
    chat_params = blank.build_chat_params(
        template.chat_template, template.chat_template_content_format
    ).with_defaults(merge_kwargs(template.default_chat_template_kwargs, {"tokenize": False}))

    def render(plain: PlainChat) -> Prompt:
        given = parameters(plain)
        request = blank.model_copy(update=given)
        messages: list[Any] = [{"role": one.role, "content": one.content} for one in plain.messages]
        limits = request.build_tok_params(serving.model_config)
        _, (rendered,) = serving.renderer.render_chat([messages], chat_params, limits)
        asked = given.get("max_completion_tokens")
        most = given.get("max_tokens") if asked is None else asked
        return rendered, _sampling(serving, request, rendered, most)

    return render


def completion_prompts(serving: Any) -> Callable[[PlainCompletion], Prompt]:
    """As `chat_prompts`, for completions. serving: vLLM's OpenAIServingCompletion."""
    blank, config = CompletionRequest.model_validate({"prompt": "any"}), serving.model_config

    def render(plain: PlainCompletion) -> Prompt:
        request = blank.model_copy(update=parameters(plain))
        prompt = parse_model_prompt(config, plain.prompt)
        (rendered,) = serving.renderer.render_cmpl([prompt], request.build_tok_params(config))
        return rendered, _sampling(serving, request, rendered, request.max_tokens)

    return render


def _sampling(serving: Any, request: Any, rendered: Any, max_tokens: int | None) -> SamplingParams:
    defaults = serving.default_sampling_params
    most = get_max_tokens(
        serving.model_config.max_model_len,
        max_tokens,
        len(rendered["prompt_token_ids"]),
        defaults,
        serving.override_max_tokens,
    )
    params: SamplingParams = request.to_sampling_params(most, defaults)
    params.stream_interval = TOKENS_AT_A_TIME
    return params
