"""Renders a plain request as vLLM's OpenAI layer would: chat template, tokenizer, limits, default parameters.

In each step vLLM's own code, except that nothing is validated again. Importing this file imports vLLM.
"""

from __future__ import annotations

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


class ChatPrompts:
    """Of chats."""

    def __init__(self, serving: Any) -> None:
        """serving: vLLM's OpenAIServingChat."""
        self._serving = serving
        self._blank = ChatCompletionRequest.model_validate({"messages": []})
        template: Any = serving.online_renderer
        self._chat_params = self._blank.build_chat_params(
            template.chat_template, template.chat_template_content_format
        ).with_defaults(merge_kwargs(template.default_chat_template_kwargs, {"tokenize": False}))

    def render(self, plain: PlainChat) -> Prompt:
        """Raises: what vLLM raises for a request that it refuses."""
        given = parameters(plain)
        request = self._blank.model_copy(update=given)
        messages: list[Any] = [{"role": one.role, "content": one.content} for one in plain.messages]
        limits = request.build_tok_params(self._serving.model_config)
        _, (rendered,) = self._serving.renderer.render_chat([messages], self._chat_params, limits)
        asked = given.get("max_completion_tokens")
        most = given.get("max_tokens") if asked is None else asked
        return rendered, _sampling(self._serving, request, rendered, most)


class CompletionPrompts:
    """Of completions."""

    def __init__(self, serving: Any) -> None:
        """serving: vLLM's OpenAIServingCompletion."""
        self._serving = serving
        self._blank = CompletionRequest.model_validate({"prompt": "any"})

    def render(self, plain: PlainCompletion) -> Prompt:
        """Raises: what vLLM raises for a request that it refuses."""
        given = parameters(plain)
        request = self._blank.model_copy(update=given)
        config = self._serving.model_config
        prompt = parse_model_prompt(config, plain.prompt)
        (rendered,) = self._serving.renderer.render_cmpl([prompt], request.build_tok_params(config))
        return rendered, _sampling(self._serving, request, rendered, request.max_tokens)


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
