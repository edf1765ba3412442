"""Makes the arguments of a forced tool call an object that fits the tool's schema.

vLLM enforces the schema only for tools with `strict`. For others it enforces a call, but its arguments may be
any JSON, where clients expect an object, and fail. Importing this file imports vLLM.

Work-around for vLLM 0.32. Remove when it holds a forced call to its tool's schema, `strict` or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tool_parsers import structural_tag_registry

from penstock.engines.vllm.frontend import limits, structured_output

_CHATS = ("openai_serving_chat", "anthropic_serving_messages", "cohere_serving_chat_v2")
_NO_ARGUMENTS = {"type": "object", "properties": {}}

_parameters: Callable[[Any], dict[str, Any] | bool] = structural_tag_registry.get_function_parameters


def hold_arguments(state: Any) -> None:
    """For every endpoint with tools in the state of vLLM's app."""
    for serving in _CHATS:
        limits.before(state, serving, "create_chat_completion", be_strict)
    limits.before(state, "openai_serving_responses", "create_responses", be_strict)
    structural_tag_registry.get_function_parameters = _at_least_an_object


def be_strict(request: Any) -> None:
    """Sets `strict` where a call is forced, on tools that leave it open and allow it, and drops stop strings,
    which would cut the call.

    A tool without parameters takes none, as in OpenAI's API.
    """
    if request.tool_choice in (None, "none", "auto"):
        return
    request.stop = []
    functions = list(_functions(request))
    for function in functions:
        function.parameters = function.parameters or dict(_NO_ARGUMENTS)
    if functions and _fits(limits.check_form, {"anyOf": [function.parameters for function in functions]}):
        for function in functions:
            if function.strict is None and _fits(_check, function.parameters):
                function.strict = True


def _at_least_an_object(function: Any) -> dict[str, Any] | bool:
    """vLLM's schema of a call's arguments; an object where vLLM would take any JSON."""
    schema = _parameters(function)
    return {"type": "object"} if schema is True else schema


def _functions(request: Any) -> Iterator[Any]:
    """Chats wrap a tool's function, Responses does not."""
    for tool in request.tools or ():
        if tool.type == "function":
            yield getattr(tool, "function", tool)


def _fits(check: Any, schema: dict[str, Any]) -> bool:
    try:
        check(StructuredOutputsParams(json=schema))
    except VLLMValidationError:
        return False
    return True


def _check(form: StructuredOutputsParams) -> None:
    structured_output.check(SamplingParams(structured_outputs=form))
