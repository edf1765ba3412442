"""Substitutes a prompt from the user's preprocessor for the one that vLLM would render.

vLLM's handlers render a request's messages or text, then do all the rest: sampling, tools, streams, usage.
Only the rendering is replaced, and only for requests with a prepared prompt's placeholder, so that vLLM's own
probes of the chat template are unaffected.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError

from penstock.engine import Prompt
from penstock.errors import BadRequest
from penstock.request_context import PreparedPrompt, prepared_prompt

Render = Callable[..., Awaitable[Any]]

_NO_PLACE = re.compile(r"mm_items\['(\w+)'\]\[(\d+)\]")

_OURS = ("mm_processor_kwargs", "media_io_kwargs")
"""Request fields about its own media, which do not apply to a prompt that has its media already."""


def parsed(model_config: Any, prompt: Prompt) -> Any:
    """A user's prompt in vLLM's parsed form.

    qwen-vl-utils gives `fps` as a list with a number per video, which model cards pass on as it is;
    transformers takes one number now, and none without a video.
    Raises: BadRequest for what the core could not decode; what vLLM raises for what it rejects.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    check(prompt)
    if isinstance(prompt, Mapping):
        options: Mapping[str, Any] = prompt.get("mm_processor_kwargs") or {}
        match options.get("fps"):
            case []:
                rest = {name: value for name, value in options.items() if name != "fps"}
                prompt = {**prompt, "mm_processor_kwargs": rest}
            case [rate, *others] if all(other == rate for other in others):
                prompt = {**prompt, "mm_processor_kwargs": {**options, "fps": rate}}
            case _:
                pass
    return parse_model_prompt(model_config, prompt)


def check(prompt: Prompt) -> None:
    """vLLM accepts True as a token id, and any type as a cache salt.

    Raises: BadRequest for what the core could not decode.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(ids, list):
        try:
            msgspec.convert(ids, list[int])
        except msgspec.ValidationError as error:
            raise BadRequest("A prompt's token ids are whole numbers.", param="prompt_token_ids") from error
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    if not isinstance(salt, str | None):
        raise BadRequest("cache_salt is a text.", param="cache_salt")


def take_prepared(renderer: Any, model_config: Any) -> None:
    """Makes `renderer`, shared by all of vLLM's handlers, look for prepared prompts."""
    render_chat, render_text = renderer.render_chat_async, _placed(renderer.render_cmpl_async)

    async def chat(
        conversations: Sequence[Any], chat_params: Any, tok_params: Any = None, **more: Any
    ) -> Any:
        ours = _meant([conversation[-1:] for conversation in conversations])
        if ours is None:
            _refuse_signs(conversations)
            return await render_chat(conversations, chat_params, tok_params, **more)
        return [[]], await engine_inputs(ours, tok_params, more)

    async def text(prompts: Sequence[Any], tok_params: Any = None, **more: Any) -> Any:
        ours = _meant(prompts)
        if ours is None:
            return await render_text(prompts, tok_params, **more)
        return await engine_inputs(ours, tok_params, more)

    async def engine_inputs(ours: PreparedPrompt, tok_params: Any, more: Mapping[str, Any]) -> Any:
        """The prompt as `generate` would read it, within the limits of the request."""
        if tok_params is not None:
            usual = renderer.default_cmpl_tok_params.add_special_tokens
            tok_params = replace(tok_params, add_special_tokens=usual)
        extras = {
            name: value for name, value in (more.get("prompt_extras") or {}).items() if name not in _OURS
        }
        prompt = parsed(model_config, ours.take())
        return await render_text([prompt], tok_params, **{**more, "prompt_extras": extras})

    renderer.render_chat_async, renderer.render_cmpl_async = chat, text


def _placed(render: Render) -> Render:
    """`render`, with an error about the prompt itself translated."""

    async def rendered(*args: Any, **kwargs: Any) -> Any:
        try:
            return await render(*args, **kwargs)
        except AssertionError as error:  # vLLM's wording
            if (match := _NO_PLACE.search(str(error))) is None:
                raise
            modality, number = match[1], int(match[2]) + 1
            raise VLLMValidationError(
                f"The prompt has no placeholder for {modality} {number}: it must hold one for each item "
                "of multi_modal_data, as the model's chat template writes it."
            ) from error

    return rendered


def _refuse_signs(conversations: Sequence[Any]) -> None:
    """Rejects follow-ups to a stored response that holds a placeholder in place of its input.

    Raises: VLLMValidationError.
    """
    for conversation in conversations:
        for message in conversation:
            content = message.get("content") if isinstance(message, dict) else None
            texts = (part.get("text") for part in content) if isinstance(content, list) else (content,)
            if any(isinstance(text, str) and PreparedPrompt.PLACEHOLDER.fullmatch(text) for text in texts):
                raise VLLMValidationError(
                    "The response that `previous_response_id` names was made from a prompt of this model's "
                    "preprocessor, which is not kept. Send the conversation in `input`."
                )


def _meant(given: Sequence[Any]) -> PreparedPrompt | None:
    ours = prepared_prompt.get()
    return ours if ours is not None and ours.placeholder in str(given) else None
