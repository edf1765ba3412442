"""Names and types of the parameters that engines know beside a chat's messages or a completion's prompt.

They are vLLM's and OpenAI's. A row of a batch, and a preprocessor beside its prompt, may set these.
"""

from __future__ import annotations

SAMPLING = {
    **dict.fromkeys(("n", "seed", "top_k", "max_tokens", "min_tokens", "max_completion_tokens"), "whole"),
    **dict.fromkeys(("top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "priority"), "whole"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), "number"),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), "number"),
    **dict.fromkeys(("stop", "bad_words"), "texts"),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids", "logprob_token_ids"), "wholes"),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"), "bool"),
    **dict.fromkeys(("spaces_between_special_tokens", "use_beam_search", "watermarking"), "bool"),
    **dict.fromkeys(("logit_bias", "structured_outputs", "repetition_detection", "vllm_xargs"), "object"),
    **dict.fromkeys(("truncation_side", "cache_salt"), "text"),
    "thinking_token_budget": "whole",
    "add_special_tokens": "bool",
    "response_format": "object",
    "logprobs": "any",  # a bool in chats, a number in completions and in vLLM's own
}
"""The type of each name."""
CHAT = {
    **dict.fromkeys(("parallel_tool_calls", "include_reasoning", "add_generation_prompt"), "bool"),
    **dict.fromkeys(("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"), "object"),
    **dict.fromkeys(("reasoning_effort", "chat_template"), "text"),
    "continue_final_message": "bool",
    "tools": "objects",
    "tool_choice": "any",
}
COMPLETIONS = {"suffix": "text", "best_of": "whole", "echo": "bool"}
GENERATING = {**SAMPLING, **CHAT, **COMPLETIONS, "return_token_ids": "bool"}
"""All of them."""
