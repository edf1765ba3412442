"""A row's fields as the request that its engine gets: the only place where rows become requests.

Fields are what the user's preprocessing returned, or the row itself. They become bytes here, so that a table,
which gives all of its rows one type, cannot change them later.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from penstock.data.rows import messages
from penstock.data.rows.coerce import as_list, expect, invalid_field, to_dict, to_json, type_name
from penstock.data.rows.input_columns import (
    IDS,
    INPUTS,
    MEDIA,
    check_columns,
    is_batch_line,
    parse_batch_line,
)
from penstock.data.rows.parameters import CHAT_ONLY, COMPLETIONS_ONLY, for_endpoint, read_parameters
from penstock.data.rows.request import CHAT, COMPLETIONS, POOLING_PATHS, RowRequest, Task
from penstock.errors import BadRequest

Fields = dict[str, Any]

_PROMPT_KEYS = {"prompt", "prompt_token_ids", *MEDIA.values(), "mm_processor_kwargs", "cache_salt", "type"}
_OF_MEDIA = {"mm_processor_kwargs", "media_io_kwargs"}
_PAIR = {
    "text_1": "text_1",
    "query": "text_1",
    "queries": "text_1",
    "text_2": "text_2",
    "document": "text_2",
    "documents": "text_2",
}
"""Fields of a score request, and their names at the endpoint."""

_encode = msgspec.json.Encoder().encode


def build_request(
    fields: Mapping[str, Any], task: Task, defaults: Mapping[str, Any] | None = None
) -> RowRequest:
    """The request of a row. A line of an OpenAI batch file (`custom_id`, `url`, `body`) is sent as it is.

    defaults: fields for rows that do not set them; sampling parameters one by one.
    Where the request has a `prompt`, its body's `messages` or `prompt` is "", for the backend to replace.
    Raises: BadRequest naming the field, what is wrong with it, and what is allowed; DownloadFailed when a
        file that the row names could not be fetched now.
    """
    if is_batch_line(fields):
        return parse_batch_line(fields, task.own_paths)
    check_columns(fields, task.kind)
    default_fields = defaults or {}
    own = read_parameters(fields, task.kind)
    extra = to_dict(default_fields.get("extra_body"), "extra_body") | to_dict(
        fields.get("extra_body"), "extra_body"
    )
    given = {name: item for one in (default_fields, fields) for name, item in one.items() if item is not None}
    path, body, prompt = _path_and_input(given, own, task)
    body |= for_endpoint(read_parameters(default_fields, task.kind) | own, path, prompt is not None)
    if task.kind == "generate":
        if task.token_ids:  # else omitted: strict services refuse fields that they do not know
            body.setdefault("return_token_ids", True)
    elif task.kind == "embed":
        body["encoding_format"] = "base64"  # the same numbers in a third of the bytes
    body |= {name: to_json(value, f"extra_body.{name}") for name, value in extra.items()}
    if body.get("stream"):
        raise invalid_field("extra_body.stream", "asks for a stream, but rows do not stream")
    return RowRequest(path=path, body=_encode(body), model=_model(given, task), prompt=prompt)


def prompt_as_message(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with a text in `prompt` as a chat message, where nothing in them asks for a completion."""
    others = ("messages", *IDS, *MEDIA, *COMPLETIONS_ONLY)
    if not isinstance(fields.get("prompt"), str | bytes) or any(
        fields.get(name) is not None for name in others
    ):
        return fields
    rest = {name: value for name, value in fields.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": fields["prompt"]}]}


def _path_and_input(given: Fields, own: Fields, task: Task) -> tuple[str, Fields, bytes | None]:
    """The endpoint, the input as the body has it, and the engine prompt."""
    if task.kind == "score":
        return POOLING_PATHS["score"], _pair(given), None
    if task.kind != "generate":
        return POOLING_PATHS[task.kind], _pooled(given, task), None
    if given.get("messages") is not None and not any(name in given for name in IDS):
        _refuse_beside("messages", given, INPUTS["generate"])
        _refuse_parameters(own, COMPLETIONS_ONLY, "`prompt`, not with `messages`")
        return CHAT, {"messages": messages.read_messages(given["messages"], task)}, None
    prompt = given.get("prompt")
    if messages.is_messages(prompt):
        _refuse_beside("prompt", given, INPUTS["generate"])
        return CHAT, {"messages": messages.read_messages(prompt, task, "prompt")}, None
    if isinstance(prompt, Mapping) or "mm_processor_kwargs" in own or any(name in given for name in MEDIA):
        return _engine_prompt(given, own)
    _refuse_parameters(own, CHAT_ONLY, "`messages`, not with `prompt`")
    return COMPLETIONS, {"prompt": _text_or_ids(given)}, None


def _refuse_beside(name: str, given: Fields, others: tuple[str, ...]) -> None:
    if beside := [other for other in others if other != name and other in given]:
        raise invalid_field(name, f"is given beside {', '.join(beside)}; give only one of them")


def _refuse_parameters(own: Fields, names: frozenset[str], goes_with: str) -> None:
    if wrong := sorted(names & own.keys()):
        raise invalid_field(wrong[0], f"goes with {goes_with}")


def _text_or_ids(given: Fields) -> str | list[int]:
    """Token ids win over a text or messages beside them, which a tokenizer has left there."""
    for name in IDS:
        if name in given:
            return _ids(given[name], name)
    prompt = as_list(given["prompt"])
    if isinstance(prompt, str | bytes):
        return to_json(prompt, "prompt")
    if not isinstance(prompt, list):
        raise invalid_field(
            "prompt",
            f"is {type_name(given['prompt'])}; it must be a string, token ids, messages or an engine's dict",
        )
    return _ids(cast("list[Any]", prompt), "prompt")


def _ids(value: Any, where: str) -> list[int]:
    found = as_list(value)
    if not isinstance(found, list) or not found:
        raise invalid_field(
            where, f"is {'empty' if found == [] else type_name(value)}; it must be a list of token ids"
        )
    if found is not value and all(type(item) is int for item in cast("list[Any]", found)):
        return cast("list[int]", found)
    return expect(found, where, "wholes")


def _engine_prompt(given: Fields, own: Fields) -> tuple[str, Fields, bytes]:
    """A prompt with media objects, pickled for the engine as it is."""
    prompt = given.get("prompt")
    found: Fields = dict(cast("Mapping[str, Any]", prompt)) if isinstance(prompt, Mapping) else {}
    for name in found:
        if name not in _PROMPT_KEYS:
            raise invalid_field(
                f"prompt.{name}", f"is not known; an engine prompt has {', '.join(sorted(_PROMPT_KEYS))}"
            )
    if not found and any(name in given for name in ("prompt", *IDS)):
        text = _text_or_ids(given)
        found["prompt" if isinstance(text, str) else "prompt_token_ids"] = text
    elif found.get("prompt_token_ids") is not None:
        found["prompt_token_ids"] = _ids(found["prompt_token_ids"], "prompt.prompt_token_ids")
    found |= {MEDIA[name]: given[name] for name in MEDIA if name in given}
    if "mm_processor_kwargs" in own:
        found["mm_processor_kwargs"] = own["mm_processor_kwargs"]
    if not found.keys() & {"prompt", "prompt_token_ids", "prompt_embeds"}:
        raise invalid_field(
            "multi_modal_data", "needs a `prompt` beside it: text or token ids with its placeholders"
        )
    try:
        pickled = pickle.dumps(found, protocol=5)
    except Exception as error:  # whatever the user's objects raise
        raise invalid_field("prompt", f"cannot be sent to the engine's process ({error})") from error
    chats = bool((CHAT_ONLY - _OF_MEDIA) & own.keys())
    return (CHAT, {"messages": ""}, pickled) if chats else (COMPLETIONS, {"prompt": ""}, pickled)


def _pooled(given: Fields, task: Task) -> Fields:
    name = next(name for name in INPUTS[task.kind] if name in given)
    if name == "messages" or messages.is_messages(given[name]):
        _refuse_beside(name, given, INPUTS[task.kind])
        return {"messages": messages.read_messages(given[name], task, name)}
    if name == "input":
        _refuse_beside(name, given, INPUTS[task.kind])
        given = {"prompt": _single(given["input"])}
    try:
        return {"input": _text_or_ids(given)}
    except BadRequest as error:
        if name != "input":
            raise
        raise invalid_field(
            "input", "must be one string, or the token ids of one: a row has one input"
        ) from error


def _single(value: Any) -> Any:
    """The only item of a list of one."""
    value = as_list(value)
    if isinstance(value, list) and len(cast("list[Any]", value)) == 1 and not isinstance(value[0], int):
        return cast("list[Any]", value)[0]
    return cast("Any", value)


def _pair(given: Fields) -> Fields:
    found: Fields = {}
    for name, field in _PAIR.items():
        if name not in given:
            continue
        if field in found:
            raise invalid_field(name, f"is given beside another `{field}`; give one of them")
        found[field] = expect(given[name], name, "texts")
        if not isinstance(found[field], str) and not found[field]:
            raise invalid_field(name, "is empty; give a string or a list of strings")
    for field, other in (("text_1", "query"), ("text_2", "documents")):
        if field not in found:
            raise invalid_field(field, f"is missing (or `{other}`): a score compares two texts")
    return found


def _model(given: Fields, task: Task) -> str | None:
    model, adapter = given.get("model"), given.get("adapter")
    for name, value in (("model", model), ("adapter", adapter)):
        if value is not None and not (isinstance(value, str) and value):
            raise invalid_field(name, f"is {type_name(value)}; it must be a name")
    if adapter is not None:
        base = model or task.model
        if base is None:
            raise invalid_field(
                "adapter", f"is {adapter!r}, but of no known model; give `model` as 'base:{adapter}'"
            )
        return base if base.endswith(f":{adapter}") else f"{base}:{adapter}"
    own = task.model or ""
    if model is None or not (task.alone and own) or model == own or model.startswith(f"{own}:"):
        return model
    return f"{own}:{model}"
