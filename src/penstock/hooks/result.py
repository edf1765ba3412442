"""Interprets a preprocessor's return value: an edited request, or a prompt for the engine."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any, cast

from penstock.engine import Prompt
from penstock.openai.parameters import GENERATING

PROMPT_KEYS = frozenset(
    {
        "prompt",
        "prompt_token_ids",
        "prompt_embeds",
        "multi_modal_data",
        "multi_modal_uuids",
        "mm_processor_kwargs",
        "cache_salt",
    }
)
"""A dict of these alone, with one of the first three, is a prompt for the engine."""

SAMPLING = frozenset(GENERATING)
"""Parameters that rows of a batch may set, too. Engines that are servers of other projects have more."""


_ALIKE = 0.8
_WITH_PARAMETERS_OF_THEIR_OWN = ("sglang", "process")
"""Engines whose server has other parameters; a name that is like a known one is a slip there, too."""

_INPUTS = ("messages", "prompt", "input")
_ENGINE_ONLY = ("multi_modal_data", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Meant:
    """The request to continue with; the engine prompt that replaces its input, if there is one.

    sampling: parameters beside that prompt, by the names of chat completions.
    """

    request: Mapping[str, Any]
    prompt: Prompt | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])


def meant(returned: Any, request: Mapping[str, Any], *, engine: str = "vllm") -> Meant:
    """Interprets what the preprocessor returned for `request`. engine: its name in the config.

    Raises: TypeError saying what a preprocessor may return.
    """
    if isinstance(returned, tuple):
        prompt, sampling = _pair(cast("tuple[Any, ...]", returned), engine)
        return Meant(request, _plain(prompt), sampling)
    if not isinstance(returned, Mapping):
        raise _unclear(f"returned {'nothing' if returned is None else f'a {type(returned).__name__}'}")
    found = cast("Mapping[str, Any]", returned)
    if is_prompt(found):
        return Meant(request, _plain(found))
    if PROMPT_KEYS.issuperset(found) and "prompt" in found and "prompt" not in request:
        raise _unclear(f"returned a 'prompt' of type {type(found['prompt']).__name__}, not a text")
    if beside := [name for name in _ENGINE_ONLY if name in found]:
        raise _unclear(f"returned {beside[0]!r} beside fields of a request")
    if any(name in request and name not in found for name in _INPUTS):
        raise _unclear(f"returned a dict with the keys {', '.join(map(repr, sorted(found))) or 'of none'}")
    return Meant(found)


def is_prompt(value: Mapping[str, Any]) -> bool:
    """Whether `value` is an engine prompt and nothing else."""
    return PROMPT_KEYS.issuperset(value) and any(
        (isinstance(value.get("prompt"), str), "prompt_token_ids" in value, "prompt_embeds" in value)
    )


def _plain(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    """With token ids as engines take them, whatever a tokenizer returned (an array, a tensor); the rest
    unchanged.
    """
    ids = prompt.get("prompt_token_ids")
    if ids is None:
        return prompt
    try:
        return {**prompt, "prompt_token_ids": [index(token_id) for token_id in ids]}
    except TypeError as error:
        raise _unclear("returned 'prompt_token_ids' that are no sequence of whole numbers") from error


def _pair(returned: tuple[Any, ...], engine: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if len(returned) != 2:
        raise _unclear(f"returned {len(returned)} values")
    prompt, sampling = returned
    if not isinstance(prompt, Mapping) or not is_prompt(cast("Mapping[str, Any]", prompt)):
        raise _unclear("returned a pair whose first is no engine prompt")
    if not isinstance(sampling, Mapping | None):
        raise _unclear(f"returned a pair whose second is a {type(sampling).__name__}")
    given = cast("Mapping[str, Any]", sampling or {})
    for name in given.keys() - SAMPLING:
        close = difflib.get_close_matches(str(name), SAMPLING, 1, _ALIKE)
        if close or engine not in _WITH_PARAMETERS_OF_THEIR_OWN:
            hint = f": did it mean {close[0]!r}?" if close else ""
            raise _unclear(f"returned the sampling parameter {name!r}, which is not known{hint}")
    return cast("Mapping[str, Any]", prompt), given


def _unclear(what: str) -> TypeError:
    return TypeError(
        f"The preprocessor {what}. It may return the request as a dict, an engine prompt "
        f"(a dict of {', '.join(sorted(PROMPT_KEYS))}), or a pair: an engine prompt and a dict of sampling "
        "parameters, by the names of chat completions."
    )
