"""Names and types of the parameters that engines know beside a chat's messages or a completion's prompt.

They are vLLM's and OpenAI's. A row of a batch, and a preprocessor beside its prompt, may set these.
"""

SAMPLING = {
    "n": "whole",
    "seed": "whole",
    "top_k": "whole",
    "max_tokens": "whole",
    "min_tokens": "whole",
    "max_completion_tokens": "whole",
    "top_logprobs": "whole",
    "prompt_logprobs": "whole",
    "truncate_prompt_tokens": "whole",
    "thinking_token_budget": "whole",
    "priority": "whole",
    "temperature": "number",
    "top_p": "number",
    "min_p": "number",
    "frequency_penalty": "number",
    "presence_penalty": "number",
    "repetition_penalty": "number",
    "length_penalty": "number",
    "stop": "texts",
    "bad_words": "texts",
    "stop_token_ids": "wholes",
    "allowed_token_ids": "wholes",
    "logprob_token_ids": "wholes",
    "ignore_eos": "bool",
    "include_stop_str_in_output": "bool",
    "skip_special_tokens": "bool",
    "spaces_between_special_tokens": "bool",
    "use_beam_search": "bool",
    "watermarking": "bool",
    "add_special_tokens": "bool",
    "logit_bias": "object",
    "structured_outputs": "object",
    "repetition_detection": "object",
    "vllm_xargs": "object",
    "response_format": "object",
    "logprobs": "any",  # a bool in chats, a number in completions and in vLLM's own
    "truncation_side": "text",
    "cache_salt": "text",
}
CHAT = {
    "tools": "objects",
    "tool_choice": "any",
    "parallel_tool_calls": "bool",
    "reasoning_effort": "text",
    "include_reasoning": "bool",
    "chat_template": "text",
    "chat_template_kwargs": "object",
    "add_generation_prompt": "bool",
    "continue_final_message": "bool",
    "media_io_kwargs": "object",
    "mm_processor_kwargs": "object",
}
COMPLETIONS = {"suffix": "text", "best_of": "whole", "echo": "bool"}
GENERATING = {**SAMPLING, **CHAT, **COMPLETIONS, "return_token_ids": "bool"}
"""All of them."""
