"""Which endpoints of an engine answer plain requests, by its configuration. Importing this file imports vLLM.

Left out is whatever would change a prompt or add to a response of plain requests.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.utils.mistral import is_mistral_tokenizer

from penstock.engines.vllm.frontend.direct_routes import foreign_middleware
from penstock.engines.vllm.frontend.timing import TimedLLM
from penstock.engines.vllm.rows.body import chat_body, completion_body
from penstock.engines.vllm.rows.plain import CHAT, COMPLETIONS
from penstock.engines.vllm.rows.prompts import chat_prompts, completion_prompts
from penstock.engines.vllm.rows.responder import PlainEndpoint, RowResponder


async def row_responder(llm: TimedLLM, app: FastAPI) -> RowResponder | None:
    """app: vLLM's. None for an engine whose requests are never plain."""
    counts = getattr(app.state, "enable_server_load_tracking", False)  # at each endpoint
    if not _is_plain(llm.vllm_config) or foreign_middleware(app) or counts:
        return None
    chat, completion = app.state.openai_serving_chat, app.state.openai_serving_completion
    endpoints = dict[str, PlainEndpoint]()
    if type(chat) is OpenAIServingChat and _adds_nothing(chat) and _renders_by_template(chat):
        render, body = chat_prompts(chat), await chat_body(chat)
        endpoints[CHAT] = PlainEndpoint("chatcmpl", chat.models.model_name(None), render, body)
    if type(completion) is OpenAIServingCompletion and _adds_nothing(completion):
        render, body = completion_prompts(completion), completion_body(completion)
        endpoints[COMPLETIONS] = PlainEndpoint("cmpl", completion.models.model_name(None), render, body)
    return RowResponder(llm, endpoints) if endpoints else None


def _is_plain(config: VllmConfig) -> bool:
    """Whether outputs are tokens alone, of prompts of tokens alone."""
    model = config.model_config
    outputs: Any = getattr(config, "aux_output_config", model)  # vLLM 0.30 has none
    return not (
        model.skip_tokenizer_init
        or model.is_encoder_decoder
        or model.is_diffusion
        or model.enable_prompt_embeds
        or model.return_sampling_mask
        or outputs.enable_return_routed_experts
        or config.speculative_config
        or config.kv_transfer_config
        or config.ec_transfer_config
        or config.observability_config.otlp_traces_endpoint
    )


def _adds_nothing(serving: Any) -> bool:
    return serving.request_logger is None and not serving.enable_per_request_metrics


def _renders_by_template(chat: OpenAIServingChat) -> bool:
    """Whether a message's text is put into the chat template and the answer's text is its content."""
    tokenizer = chat.renderer.tokenizer
    return (
        chat.parser_cls is None
        and not chat.online_renderer.use_harmony
        and not is_mistral_tokenizer(tokenizer)
    )
