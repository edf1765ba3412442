"""What one request may ask vLLM for: forms of answers that would hold up everybody else are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from penstock.engines.vllm.arguments import environment
from penstock.engines.vllm.frontend import limits, structured_output
from penstock.errors import BadRequest

TEXT = {"type": "string"}


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": TEXT for number in range(count)}}


def values(count: int) -> list[str]:
    return [f"value {number}" for number in range(count)]


def checked(**form: Any) -> None:
    structured_output.check(SamplingParams(structured_outputs=StructuredOutputsParams(**form)))


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": properties(limits.MOST_PROPERTIES + 1)}, "2,001 properties; 2,000"),
        ({"json": {"$defs": {"a": properties(1_500), "b": properties(1_500)}}}, "properties"),
        ({"json": {"enum": values(limits.MOST_VALUES + 1)}}, "values of enum"),
        ({"json": {"enum": ["a" * (limits.MOST_LITERAL + 1)]}}, "text of the JSON schema"),
        ({"json": TEXT | {"pattern": "a" * (limits.MOST_REGEX + 1)}}, "pattern"),
        ({"json": '"' + "a" * limits.MOST_FORM + '"'}, "characters"),
        ({"choice": values(limits.MOST_VALUES + 1)}, "texts"),
        ({"choice": ["a" * (limits.MOST_LITERAL + 1)]}, "text of the choice"),
        ({"regex": "a" * (limits.MOST_REGEX + 1)}, "regex"),
        ({"grammar": "a" * (limits.MOST_GRAMMAR + 1)}, "grammar"),
    ],
)
def test_a_form_above_a_limit_is_refused_with_the_limit(form: dict[str, Any], said: str):
    with pytest.raises(VLLMValidationError, match=said):
        checked(**form)


def test_a_form_within_the_limits_is_taken():
    checked(json=properties(200) | {"description": "enum and properties"})
    checked(choice=values(200))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"oneOf": [{"$ref": "#"}]}]},
        '{"$ref": "#"}',
    ],
)
def test_a_schema_that_is_nothing_but_itself_is_refused(schema: Any):
    with pytest.raises(VLLMValidationError, match="refers to itself"):
        checked(json=schema)


OTHER = {"$ref": "other.json"}


@pytest.mark.parametrize("target", ["http://127.0.0.1:9440/x", "file:///etc/passwd", "other.json#/a", ""])
def test_a_schema_that_refers_to_another_document_is_refused(target: str):
    with pytest.raises(VLLMValidationError, match="refers to another document"):
        checked(json={"type": "object", "properties": {"a": {"$ref": target}}})


@pytest.mark.parametrize("name", ["default", "$ref", "properties"])
def test_a_property_may_have_any_name(name: str):
    inside = {"type": "object", "properties": {name: {"type": "object", "properties": {"a": OTHER}}}}
    with pytest.raises(VLLMValidationError, match="refers to another document"):
        checked(json=inside)


@pytest.mark.parametrize(
    "form", [{"const": OTHER}, {"enum": [OTHER]}, TEXT | {"default": OTHER, "examples": [OTHER]}]
)
def test_a_reference_in_data_is_data(form: dict[str, Any]):
    checked(json={"type": "object", "properties": {"a": form}})


def test_a_schema_that_holds_itself_is_taken():
    checked(json={"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}})


MANY = limits.MOST_ITEMS + 1


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/chat/completions", {"messages": [1] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
        ("/v1/chat/completions", {"prompt": [1] * MANY}),
        ("/v1/responses", {"input": [1] * MANY}),
        ("/v1/completions", {"prompt": [True] * MANY}),
        ("/v1/completions", {"prompt": [[1], [None] * MANY]}),
        ("/v1/embeddings", {"input": ["a"] * MANY}),
        ("/v1/embeddings", {"input": "a", "extra": {str(number): 1 for number in range(MANY)}}),
        ("/v1/embeddings", [[[]] * MANY]),
    ],
)
def test_more_members_than_can_be_looked_at_are_refused(path: str, request_: Any):
    with pytest.raises(BadRequest, match="more than 50,000 members"):
        limits.check_items(path, request_)


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/v1/completions", {"prompt": [1] * MANY}),
        ("/v1/completions", {"prompt": [[1] * MANY, [2] * MANY]}),
        ("/v1/embeddings", {"input": [1] * MANY}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 10_000}),
    ],
)
def test_token_ids_and_long_chats_are_not_too_many(path: str, request_: Any):
    limits.check_items(path, request_)


def test_more_tokens_than_are_turned_into_text_are_refused_as_soon_as_they_are_read():
    with pytest.raises(BadRequest, match="262,145 tokens; 262,144 are allowed"):
        limits.check_items("/detokenize", {"tokens": [1] * (limits.MOST_IDS + 1)})
    limits.check_items("/detokenize", {"tokens": [1] * limits.MOST_IDS})


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("/rerank", {"query": "a", "documents": ["a" * limits.MOST_TEXT] * 17}),
        ("/v1/chat/completions", {"tools": [{"parameters": {"enum": ["a" * (limits.MOST_TEXTS + 1)]}}]}),
        ("/generative_scoring", {"query": "a" * limits.MOST_FORM, "items": ["a"]}),
    ],
)
def test_more_text_than_one_request_may_hold_is_refused(path: str, request_: Any):
    with pytest.raises(BadRequest, match="texts have more than"):
        limits.check_items(path, request_)


def test_media_are_no_text():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "a" * limits.MOST_TEXTS}}
    limits.check_items("/v1/chat/completions", {"messages": [{"role": "user", "content": [picture]}]})


@pytest.mark.parametrize("name", ["prompt_embeds", "image_embeds"])
def test_embeddings_in_place_of_a_prompt_are_no_text(name: str):
    much = "a" * limits.MOST_TEXTS
    for given in (much, [much, "a"]):
        limits.check_items("/v1/completions", {name: given, "max_tokens": 1})
    with pytest.raises(BadRequest, match="more than 50,000 members"):
        limits.check_items("/v1/completions", {name: ["a"] * MANY})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_to_look_for_in_outputs_are_few_and_short(name: str):
    limits.check_words(SamplingParams(**{name: ["a"] * 4}))
    for words in ([f"{number}" for number in range(513)], ["a" * 20_000]):
        with pytest.raises(VLLMValidationError, match=rf"The list {name} has .* are allowed"):
            limits.check_words(SamplingParams(**{name: words}))


MUCH = "a" * (limits.MOST_TEXT + 1)


@pytest.mark.parametrize(
    ("serving", "method", "request_", "said"),
    [
        ("openai_serving_completion", "create_completion", {"prompt": "a", "n": 513}, "513 answers; 512"),
        ("openai_serving_completion", "create_completion", {"prompt": ["a", "b"], "n": 300}, "600 answers"),
        (
            *("openai_serving_chat_batch", "create_batch_chat_completion"),
            *({"messages": [[]] * 2_000}, "2,000 conversations"),
        ),
        ("serving_tokenization", "create_tokenize", {"prompt": MUCH}, "characters; 1,048,576"),
        ("serving_tokenization", "create_tokenize", {"messages": [{"content": MUCH}]}, "characters"),
    ],
)
async def test_more_work_than_one_request_may_ask_for_is_refused(
    serving: str, method: str, request_: dict[str, Any], said: str
):
    """Before vLLM's own serving sees it."""

    async def asked(request: Any) -> str:
        return "answered"

    names = ("create_completion", "create_batch_chat_completion", "create_tokenize")
    servings = ("openai_serving_completion", "openai_serving_chat_batch", "serving_tokenization")
    state = SimpleNamespace(**{one: SimpleNamespace(**dict.fromkeys(names, asked)) for one in servings})
    limits.hold(state)
    answer = getattr(getattr(state, serving), method)
    with pytest.raises(VLLMValidationError, match=said):
        await answer(SimpleNamespace(**request_))
    little = SimpleNamespace(prompt="a", n=1, messages=[], tokens=[1])
    assert await answer(little) == "answered"


def test_outputs_of_one_prompt_are_bounded(monkeypatch: pytest.MonkeyPatch):
    for name, value in environment._ALWAYS.items():
        monkeypatch.setenv(name, value)
    SamplingParams(n=128)
    with pytest.raises(VLLMValidationError, match="128"):
        SamplingParams(n=129)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids has 1,025 tokens; 1,024"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias has 1,025 tokens; 1,024"),
        ({"stop_token_ids": list(range(129)), "min_tokens": 1}, "stop_token_ids has 129 tokens; 128"),
        ({"bad_words": ["a" * number for number in range(1, 60)]}, "bad_words has 1,770 tokens; 1,024"),
        ({"stop_token_ids": list(range(129))}, None),
        ({"allowed_token_ids": list(range(1024))}, None),
    ],
)
def test_lists_are_as_long_as_the_installed_runner_has_room_for(fields: dict[str, Any], said: str | None):
    tokenizer: Any = SimpleNamespace(encode=lambda text, **_: [1] * len(text), max_token_id=9)  # pyright: ignore
    params = SamplingParams.from_optional(**fields)
    params.update_from_tokenizer(tokenizer)
    limits.hold_to_runner(SimpleNamespace(use_v2_model_runner=False))
    limits.check_sizes(params)
    limits.hold_to_runner(SimpleNamespace(use_v2_model_runner=True))
    limits.check_sizes(None)
    try:
        if said is None:
            limits.check_sizes(params)
        else:
            with pytest.raises(VLLMValidationError, match=said):
                limits.check_sizes(params)
    finally:
        limits.hold_to_runner(SimpleNamespace(use_v2_model_runner=False))
