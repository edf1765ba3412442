"""Makes the arguments of a forced tool call match the tool's schema.

vLLM enforces the schema only for tools with `strict`. For others it enforces a call, but its arguments may be
any JSON, where clients expect an object, and fail. Importing this file imports vLLM.

Work-around for vLLM 0.32. Remove when it holds a forced call to its tool's schema, `strict` or not.
"""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from penstock.engines.vllm.frontend import limits, structured_output


def hold_arguments(state: Any) -> None:
    """For chats and messages in the state of vLLM's app."""
    for serving in ("openai_serving_chat", "anthropic_serving_messages"):
        limits.before(state, serving, "create_chat_completion", be_strict)


def be_strict(request: Any) -> None:
    """Sets `strict` where a call is forced, on tools that leave it open and allow it."""
    if request.tool_choice in (None, "none", "auto"):
        return
    functions = [tool.function for tool in request.tools or () if tool.function.parameters]
    if functions and _fits(limits.check_form, {"anyOf": [function.parameters for function in functions]}):
        for function in functions:
            if function.strict is None and _fits(_check, function.parameters):
                function.strict = True


def _fits(check: Any, schema: dict[str, Any]) -> bool:
    try:
        check(StructuredOutputsParams(json=schema))
    except VLLMValidationError:
        return False
    return True


def _check(form: StructuredOutputsParams) -> None:
    structured_output.check(SamplingParams(structured_outputs=form))
