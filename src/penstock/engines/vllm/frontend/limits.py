"""Limits on what one request may ask for, and where vLLM's app enforces them.

A request beyond one of them would stall all others for more than a moment. The same table is in
`docs/reference/limits.md`. Importing this file imports vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sized
from typing import Any, cast

from vllm.exceptions import VLLMValidationError

from penstock.errors import BadRequest

MOST_ANSWERS = 512
"""Prompts of a completion times its `n`; conversations of a batch of chats."""

MOST_TEXT = 1 << 20
"""Characters of input to `/tokenize`."""

MOST_TEXTS = 1 << 24
"""Characters of all texts of a request together, without media."""

MOST_IDS = 1 << 18
"""Tokens of input to `/detokenize`."""

MOST_PROPERTIES = 2_000
MOST_VALUES = 5_000
"""Values of all `enum`s in a JSON schema together, or of a `choice`."""

MOST_FORM = 1 << 17
"""Characters of a JSON schema, a structural tag or a choice."""

MOST_GRAMMAR = 1 << 14
MOST_LITERAL = 1 << 13
MOST_REGEX = 1 << 12
"""Characters of a grammar, of one string in a schema or choice, of a regex or pattern: the cost grows at
least with the square.
"""

MOST_ITEMS = 50_000
"""Members of all objects and lists of a request together, without token ids."""

MOST_WORDS = 512
"""Texts in `stop`, and in `bad_words`."""

_MEDIA = frozenset(
    {
        *("url", "data", "file_data", "prompt_embeds"),
        *(f"{kind}{end}" for kind in ("image", "audio", "video") for end in ("", "_url", "_embeds")),
    }
)
_DATA = frozenset({"const", "enum", "default", "examples"})
"""Fields of a schema that hold no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Fields of a schema that hold schemas by names of the client's choice."""
_IN_EVENT_LOOP = ("/generative_scoring", "/v1/systemone")
"""Endpoints whose texts vLLM tokenizes while all other requests wait."""

_IDS = frozenset({"prompt", "prompt_token_ids", "tokens", "input"})
_ITEMS_ONLY = ("/v1/chat/", "/v1/responses", "/v1/messages")
"""Endpoints whose fields hold no token ids."""

_runner: dict[str, int] = {}
"""Tokens that vLLM's model runner has room for in each list of a request; empty for one without limits."""

Answer = Callable[..., Awaitable[Any]]


def hold(state: Any) -> None:
    """Applies the limits to the handlers in the state of vLLM's app."""
    before(state, "openai_serving_completion", "create_completion", _check_completion)
    before(state, "openai_serving_chat_batch", "create_batch_chat_completion", _check_chats)
    before(state, "serving_tokenization", "create_tokenize", _check_text)


def check_form(form: Any) -> None:
    """form: vLLM's `StructuredOutputsParams`. Raises: VLLMValidationError."""
    _refuse("The regex", len(form.regex or ""), MOST_REGEX, "characters")
    _refuse("The grammar", len(form.grammar or ""), MOST_GRAMMAR, "characters")
    if form.choice:
        _refuse("The choice", len(form.choice), MOST_VALUES, "texts")
        _refuse("The choice", sum(map(len, form.choice)), MOST_FORM, "characters")
        _refuse("A text of the choice", max(map(len, form.choice)), MOST_LITERAL, "characters")
    for schema in (form.json, form.structural_tag):
        if schema:
            _check_schema(schema)


def check_words(params: Any) -> None:
    """params: vLLM's `SamplingParams`. Raises: VLLMValidationError."""
    for name in ("stop", "bad_words"):
        words: list[str] = getattr(params, name, None) or []
        _refuse(f"The list {name}", len(words), MOST_WORDS, "texts")
        _refuse(f"The list {name}", sum(map(len, words)), MOST_GRAMMAR, "characters")


def hold_to_runner(config: Any) -> None:
    """Applies the limits of the model runner that vLLM's `config` chooses: beyond them it ends the engine."""
    _runner.clear()
    if config.use_v2_model_runner:
        from vllm import envs
        from vllm.v1.worker.gpu.sample import logit_bias

        _runner["allowed_token_ids"] = logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS
        _runner["logit_bias"] = logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS
        _runner["stop_token_ids"] = logit_bias.MAX_NUM_STOP_TOKEN_IDS
        _runner["bad_words"] = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS


def check_sizes(params: Any) -> None:
    """params: vLLM's `SamplingParams` with the model's own tokens, or None. Raises: VLLMValidationError."""
    if params is None or not _runner:
        return
    counts = {
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
        "stop_token_ids": len(params.all_stop_token_ids) if params.min_tokens else 0,
        "bad_words": sum(map(len, params.bad_words_token_ids or ())),
    }
    for name, count in counts.items():
        _refuse(f"The list {name}", count, _runner[name], "tokens")


def check_items(path: str, request: Any) -> None:
    """request: parsed JSON. Raises: BadRequest for more than can be checked in a moment."""
    waiting, count, characters = [request], 0, 0
    most = MOST_FORM if path.startswith(_IN_EVENT_LOOP) else MOST_TEXTS
    if isinstance(request, dict) and not path.startswith(_ITEMS_ONLY):
        fields = cast("dict[str, Any]", request).items()
        if (
            path == "/detokenize"
            and _is_ids(ids := cast("Any", request).get("tokens"))
            and len(ids) > MOST_IDS
        ):
            raise BadRequest(f"The list has {len(ids):,} tokens; {MOST_IDS:,} are allowed.", param="tokens")
        waiting = _values({name: value for name, value in fields if name not in _IDS or not _is_ids(value)})
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            characters += len(part)
            if characters > most:
                raise BadRequest(f"The request's texts have more than {most:,} characters. Send fewer.")
        elif isinstance(part, dict | list):
            part = cast("dict[str, Any] | list[Any]", part)
            count += len(part)
            if count > MOST_ITEMS:
                raise BadRequest(
                    f"The request has more than {MOST_ITEMS:,} members of objects and lists. Send it in "
                    "several requests."
                )
            waiting += _values(part) if isinstance(part, dict) else part


def _values(part: dict[str, Any]) -> list[Any]:
    """The values of an object in a request, without encoded media and links to them."""
    return [value for name, value in part.items() if name not in _MEDIA or not _is_texts(value)]


def _is_texts(value: Any) -> bool:
    """One text, or a list of texts."""
    if not isinstance(value, list):
        return isinstance(value, str)
    value = cast("list[Any]", value)
    return len(value) <= MOST_ITEMS and all(isinstance(one, str) for one in value)


def _is_ids(value: Any) -> bool:
    """Token ids of one prompt or of several."""
    if not isinstance(value, list):
        return False
    value = cast("list[Any]", value)
    prompts = value if set(map(type, value)) == {list} and len(value) <= MOST_ITEMS else [value]
    return all(set(map(type, ids)) <= {int} for ids in prompts)


def _check_schema(schema: Any) -> None:
    if isinstance(schema, str):
        _refuse("The JSON schema", len(schema), MOST_FORM, "characters")
        schema = decoded(schema)
    properties = values = characters = 0
    for part in _parts(schema):
        characters += 2
        if isinstance(part, str):
            characters += len(part)
            _refuse("A text of the JSON schema", len(part), MOST_LITERAL, "characters")
        elif isinstance(part, dict):
            part = cast("dict[str, Any]", part)
            properties += _length(part, "properties", dict)
            values += _length(part, "enum", list)
            _refuse("A pattern of the JSON schema", _length(part, "pattern", str), MOST_REGEX, "characters")
        _refuse("The JSON schema", properties, MOST_PROPERTIES, "properties")
        _refuse("The JSON schema", values, MOST_VALUES, "values of enum")
        _refuse("The JSON schema", characters, MOST_FORM, "characters")
    for target in _references(schema):
        if isinstance(target, str) and not target.startswith("#"):
            raise VLLMValidationError(f"The JSON schema refers to another document: '{target[:200]}'.")


def decoded(schema: Any) -> Any:
    """A schema that may be a text; None for a text that is no JSON, which its parser reports."""
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except ValueError:
        return None


def _references(schema: Any) -> Iterator[Any]:
    """Each value of `$ref` in a schema, but not in the data that it holds."""
    waiting = [(schema, False)]
    while waiting:
        part, named = waiting.pop()
        if isinstance(part, list):
            waiting += [(one, False) for one in cast("list[Any]", part)]
        elif isinstance(part, dict):
            part = cast("dict[str, Any]", part)
            if not named:
                yield part.get("$ref")
            for name, value in part.items():
                if named or name not in _DATA:
                    waiting.append((value, not named and name in _NAMED))


def _length(part: dict[str, Any], name: str, kind: type[Sized]) -> int:
    value = part.get(name)
    return len(value) if isinstance(value, kind) else 0


def _parts(schema: Any) -> Iterator[Any]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, dict):
            waiting += [*part, *part.values()]
        elif isinstance(part, list):
            waiting += part


def before(state: Any, name: str, method: str, check: Callable[[Any], None]) -> None:
    """Calls `check` with the request before a handler's method in the state of vLLM's app."""
    serving = getattr(state, name, None)
    if serving is None:
        return
    answer: Answer = getattr(serving, method)

    async def checked(request: Any, *more: Any, **named: Any) -> Any:
        check(request)
        return await answer(request, *more, **named)

    setattr(serving, method, checked)


def _check_completion(request: Any) -> None:
    prompt = request.prompt
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    _refuse("The request", (len(prompt) if several else 1) * (request.n or 1), MOST_ANSWERS, "answers")


def _check_chats(request: Any) -> None:
    _refuse("The request", len(request.messages), MOST_ANSWERS, "conversations")


def _check_text(request: Any) -> None:
    text = getattr(request, "prompt", None)
    given = [text] if text is not None else (part for part in _parts(request.messages))
    _refuse("The text", sum(len(part) for part in given if isinstance(part, str)), MOST_TEXT, "characters")


def _refuse(what: str, count: int, most: int, unit: str) -> None:
    if count > most:
        raise VLLMValidationError(f"{what} has {count:,} {unit}; {most:,} are allowed.")
