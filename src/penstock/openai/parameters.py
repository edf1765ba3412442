"""Names and types of the parameters that engines know beside a chat's messages or a completion's prompt.

They are vLLM's and OpenAI's. A row of a batch, and a preprocessor beside its prompt, may set these.
"""

from __future__ import annotations


def _by_name(**listed: str) -> dict[str, str]:
    """The type of each name; given are the names of each type."""
    return {name: kind for kind, names in listed.items() for name in names.split()}


SAMPLING = _by_name(
    whole="n seed top_k max_tokens min_tokens max_completion_tokens top_logprobs prompt_logprobs "
    "truncate_prompt_tokens thinking_token_budget priority",
    number="temperature top_p min_p frequency_penalty presence_penalty repetition_penalty length_penalty",
    texts="stop bad_words",
    wholes="stop_token_ids allowed_token_ids logprob_token_ids",
    bool="ignore_eos include_stop_str_in_output skip_special_tokens spaces_between_special_tokens "
    "use_beam_search watermarking add_special_tokens",
    object="logit_bias structured_outputs repetition_detection vllm_xargs response_format",
    any="logprobs",  # a bool in chats, a number in completions and in vLLM's own
    text="truncation_side cache_salt",
)
CHAT = _by_name(
    objects="tools",
    any="tool_choice",
    bool="parallel_tool_calls include_reasoning add_generation_prompt continue_final_message",
    text="reasoning_effort chat_template",
    object="chat_template_kwargs media_io_kwargs mm_processor_kwargs",
)
COMPLETIONS = {"suffix": "text", "best_of": "whole", "echo": "bool"}
GENERATING = {**SAMPLING, **CHAT, **COMPLETIONS, "return_token_ids": "bool"}
"""All of them."""
