"""Fields that the gateway sets or removes in a body: the rest stays, whatever stands around them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadRequest
from penstock.serve.gateway.body import BodyBudget, RequestBody, fields

NAMES = ["model", "service_tier", "priority"]
texts = st.text(max_size=5) | st.sampled_from(
    [*NAMES, '"priority": 1', '\\"service_tier\\": "x"', ',"model":', "\\", '{"priority":1,']
)
values = st.recursive(
    texts | st.integers(-99, 99) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(texts, values, max_size=5)
named = st.fixed_dictionaries({}, optional={"service_tier": texts | values, "priority": values})


def read(content: bytes) -> RequestBody:
    request = RequestBody(BodyBudget(1))
    request.content, request.fields = content, fields(content)
    return request


@given(objects, named, texts, st.sampled_from([None, "default"]), st.booleans(), st.sampled_from([None, 1]))
def test_fields_are_set_and_removed_and_all_else_stays(around, own, model, tier, ascii_only, indent):
    found = {**around, **own, "model": model}
    request = read(json.dumps(found, ensure_ascii=ascii_only, indent=indent).encode())
    request._replace({"service_tier": tier, "priority": None})
    for name in ("service_tier", "priority"):
        found.pop(name, None)
    assert json.loads(request.content) == found | ({"service_tier": tier} if tier else {})
    request = read(bytes(request.content))
    request.name_model("other")
    assert json.loads(request.content) == found | {"model": "other"} | (
        {"service_tier": tier} if tier else {}
    )


@pytest.mark.parametrize(
    "content",
    [
        rb'{"model":"m","priorit\u0079":1,"priority":2}',
        rb'{"model":"m","priority":2,"priorit\u0079":1}',
        b'{"model":"m","priority":2,"priority":1}',
        b'{"priority":{"a":1},"model":"m"}',
    ],
)
def test_no_way_to_write_priority_reaches_an_engine(content: bytes):
    request = read(content)
    request.name_tier(None)
    assert json.loads(request.content) == {"model": "m"}


def test_a_key_that_is_not_utf8_is_a_bad_request_wherever_it_is_read():
    request = read(b'{"model":"m","priority":[1],"\xff":1}')
    for change in (
        lambda: request.name_tier(None),
        lambda: request._replace({"model": "n", "priority": None}),
    ):
        with pytest.raises(BadRequest, match="not valid JSON"):
            change()


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def sent(path: str, most: int | None = 3, **given: object) -> dict[str, object]:
    """What engines get of a request whose answer may have `most` tokens."""
    request = read(json.dumps({"model": "m", **given}).encode())
    request.asked(path, most, None)
    return json.loads(request.content)


@pytest.mark.parametrize(
    ("path", "given", "becomes"),
    [
        (RESPONSES, {"max_tokens": 2}, {"max_tokens": 2, "max_output_tokens": 3}),
        (CHAT, {"max_output_tokens": 2}, {"max_output_tokens": 2, "max_tokens": 3}),
        (COMPLETIONS, {"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 3}),
        (CHAT, {"max_completion_tokens": -1}, {"max_tokens": 3}),  # to some engines: no limit
        (CHAT, {"max_completion_tokens": 2}, {"max_completion_tokens": 2}),
        (CHAT, {"max_tokens": 2, "max_completion_tokens": None}, None),
    ],
)
def test_only_fields_that_the_engine_obeys_limit_an_answer(path: str, given: object, becomes: object):
    assert sent(path, **given) == {"model": "m", **(becomes or given)}


@pytest.mark.parametrize("number", [400.0, 4e20, "400", " 4_00 ", 10**13, True, [4]])
@pytest.mark.parametrize("most", [3, None])
def test_what_engines_might_read_as_a_number_is_refused(number: object, most: int | None):
    for path, name in ((CHAT, "max_completion_tokens"), (CHAT, "n"), (RESPONSES, "max_output_tokens")):
        body = {"max_tokens": 2, name: number} if path == CHAT else {name: number}
        with pytest.raises(BadRequest, match=f"{name} must be a whole number"):
            sent(path, most, **body)


@pytest.mark.parametrize(
    ("path", "given", "prompt", "answer"),
    [
        (COMPLETIONS, {"prompt": ["x" * 80] * 4}, 80, 4 * 5),
        (COMPLETIONS, {"prompt": ["x" * 8000] * 4, "n": 2}, 4 * 90, 8 * 5),  # 90 fit into the model
        (COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]]}, 5, 2 * 5),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, 3, 5),
        (COMPLETIONS, {"prompt": "x" * 8000}, 90, 5),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 8000}] * 3}, 90, 5),
        ("/v1/embeddings", {"input": ["x" * 8000] * 4}, 4 * 90, 0),
        ("/v1/embeddings", {"input": [[1, 2, 3], [4, 5]]}, 5, 0),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 80] * 100}, 2000, 0),
    ],
)
def test_every_prompt_and_each_of_their_answers_is_reserved(path: str, given: object, prompt, answer):
    request = read(json.dumps({"model": "m", "max_tokens": 5, **given}).encode())
    request.is_object = True
    asked = request.asked(path, None, 90)
    assert asked.prompt_tokens == pytest.approx(prompt, rel=0.1, abs=30 if prompt == 80 else 0)
    assert asked.answer_tokens == answer


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("given", "images"),
    [
        ({"messages": [{"content": [{"type": "text", "text": json.dumps(PICTURE)}, PICTURE, PICTURE]}]}, 2),
        ({"messages": [{"content": [{"image_url": "https://there/a.png"}]}]}, 1),
        ({"messages": [{"content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}]}, 1),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]}]}, 1),
        ({"messages": [], "tools": [{"parameters": {"properties": {"image_url": {"type": "string"}}}}]}, 0),
    ],
)
def test_pictures_of_prompts_are_counted(given: dict[str, object], images: int):
    for indent in (None, 1):
        request = read(json.dumps({"model": "m", **given}, indent=indent).encode())
        assert request.asked(CHAT, None, None).images == images


def test_a_stream_is_asked_for_its_usage_whatever_else_would_mean_no():
    for options in ({}, {"include_usage": False}, {"include_usage": "off"}, {"include_usage": [1]}):
        request = read(json.dumps({"stream": True, "stream_options": options}).encode())
        assert request.ask_for_usage()
        assert json.loads(request.content)["stream_options"] == {"include_usage": True}
