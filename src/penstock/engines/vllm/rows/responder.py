"""Answers plain requests: read, rendered, run by AsyncLLM, and written as vLLM's own response would be.

Engines whose configuration would change a prompt, or add to a response of plain requests, have no responder.
Importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from tokenizers.decoders import ByteLevel
from transformers import TokenizersBackend
from vllm.config import VllmConfig
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from penstock.engines.vllm.frontend.direct_routes import foreign_middleware
from penstock.engines.vllm.frontend.gated_llm import GatedLLM
from penstock.engines.vllm.rows.body import BodyWriter, chat_body, completion_body
from penstock.engines.vllm.rows.bulk import Bulk
from penstock.engines.vllm.rows.plain import CHAT, COMPLETIONS, read
from penstock.engines.vllm.rows.prompts import Prompt, chat_prompts, completion_prompts
from penstock.errors import Error

_REFUSALS = (VLLMClientError, GracefulHTTPError)
"""Of a request that has not reached the engine."""

_TORN = "\N{REPLACEMENT CHARACTER}"
_TAIL = 8
"""Tokens of a prompt by which its end is judged: a character has up to four bytes, a token one at least."""


@dataclass(frozen=True, slots=True)
class PlainEndpoint:
    """prefix: of response ids. model: in responses. render: blocking, a request's prompt and parameters."""

    prefix: str
    model: str
    render: Callable[[Any], Prompt]
    body: BodyWriter


class RowResponder:
    """Of one engine. endpoints: by path, those whose requests may be plain."""

    def __init__(self, llm: GatedLLM, endpoints: dict[str, PlainEndpoint]) -> None:
        self._llm = llm
        self._endpoints = endpoints
        renderer: Any = llm.renderer
        self._rendered = Bulk[Prompt](renderer._executor)
        tokenizer = renderer.get_tokenizer()
        self._texts = Texts(tokenizer) if decodes_at_once(tokenizer) else None

    async def respond(self, path: str, body: bytes, request_id: str | None = None) -> bytes | None:
        """The body of a response with status 200; None for a request that is vLLM's application's to answer.

        request_id: for the response's id; random without it.
        Cancelling it aborts the request in the engine. Raises: Error when the engine failed on it; what
        AsyncLLM raises when it is dead.
        """
        endpoint = self._endpoints.get(path)
        plain = read(path, body) if endpoint is not None else None
        if endpoint is None or plain is None:
            return None
        if plain.model not in (None, endpoint.model):  # answers to an alias show the alias
            return None
        try:
            rendered, params = await self._rendered(partial(endpoint.render, plain))
        except Exception:  # whatever vLLM raises for a request that it refuses: its application says it
            return None
        params.detokenize = self._texts is None
        response_id = f"{endpoint.prefix}-{request_id or random_uuid()}"
        output = await self._run(rendered, params, response_id)
        if output is None:
            return None
        return endpoint.body.of(response_id, plain, output, self._text(output, params))

    async def _run(self, rendered: Any, params: SamplingParams, request_id: str) -> RequestOutput | None:
        """The last output; None when the request was refused."""
        last = None
        try:
            async with aclosing(self._llm.generate(rendered, params, request_id)) as outputs:
                async for output in outputs:
                    last = output
        except _REFUSALS:
            return None
        if last is None or last.outputs[0].finish_reason == "error":
            raise Error("The engine failed while it made this answer.")
        return last

    def _text(self, output: RequestOutput, params: SamplingParams) -> str:
        (one,) = output.outputs
        if self._texts is None:
            return one.text
        shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
        return self._texts.of(output.prompt_token_ids or [], list(shown), params)


def decodes_at_once(tokenizer: Any) -> bool:
    """Whether the text of two token lists is that of their concatenation.

    Byte-level decoders join the bytes of tokens; others strip or replace what lies between two tokens.
    """
    fast: type[Any] = TokenizersBackend  # for others, vLLM's detokenizer is its own
    return isinstance(tokenizer, fast) and isinstance(tokenizer._tokenizer.decoder, ByteLevel)


class Texts:
    """Makes the text of an output from all of its tokens, as vLLM's incremental detokenizer would.

    tokenizer: one for which `decodes_at_once` holds.
    """

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


async def row_responder(llm: GatedLLM, app: FastAPI) -> RowResponder | None:
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
