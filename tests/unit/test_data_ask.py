"""Rows as requests: what is sent, to the letter, and what is refused, by the name of the field."""

from __future__ import annotations

import json
import pickle
import random
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic
import pytest

from penstock.data.rows.builder import build_request
from penstock.data.rows.input_columns import INPUTS, request_columns
from penstock.data.rows.parameters import PARAMETERS
from penstock.data.rows.request import CHAT, COMPLETIONS, KINDS, Task
from penstock.errors import BadRequest, ConfigError

GENERATE, EMBED, CLASSIFY, SCORE = Task(), Task("embed"), Task("classify"), Task("score")
MESSAGES = [{"role": "user", "content": "Hi"}]


def body(fields: Any, task: Task = GENERATE, defaults: Any = None) -> dict[str, Any]:
    return json.loads(build_request(fields, task, defaults).body)


def sent(**fields: Any) -> dict[str, Any]:
    """The body of a chat, without what all have."""
    found = body({"messages": MESSAGES, **fields})
    assert found.pop("messages") == MESSAGES
    assert found.pop("return_token_ids") is True
    return found


def refusal(fields: Any, task: Task = GENERATE) -> str:
    with pytest.raises(BadRequest) as caught:
        build_request(fields, task)
    return str(caught.value)


# -- inputs


def test_messages_are_a_chat_and_ask_for_token_ids():
    request = build_request({"messages": MESSAGES}, GENERATE)
    assert (request.path, request.model, request.prompt) == (CHAT, None, None)
    assert request.body == b'{"messages":[{"role":"user","content":"Hi"}],"return_token_ids":true}'


@pytest.mark.parity("D8")
@pytest.mark.parametrize("name", ["prompt", "prompt_token_ids", "tokenized_prompt"])
@pytest.mark.parametrize(
    "ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.int32), pa.array([1, 2])]
)
def test_token_ids_are_a_completion_whatever_holds_them(name: str, ids: Any):
    request = build_request({name: ids}, GENERATE)
    assert request.path == COMPLETIONS
    assert json.loads(request.body)["prompt"] == [1, 2]


@pytest.mark.parity("D8")
def test_token_ids_win_over_the_text_that_they_were_made_of():
    assert body({"prompt": "a text", "tokenized_prompt": [5]})["prompt"] == [5]


def test_a_prompt_of_messages_is_a_chat():
    assert build_request({"prompt": MESSAGES}, GENERATE).path == CHAT


def test_messages_may_be_json_text_of_a_column():
    assert sent(messages=json.dumps(MESSAGES), sampling_params='{"n": 2}') == {"n": 2}


@pytest.mark.parity("D9")
@pytest.mark.parametrize("beside", [True, False])
def test_an_engines_own_prompt_arrives_as_its_objects(beside: bool):
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    media = {"multi_modal_data": {"image": picture}}
    fields = {"prompt": "<image>", **media} if beside else {"prompt": {"prompt": "<image>", **media}}
    request = build_request(fields | {"mm_processor_kwargs": {"fps": 2}, "max_tokens": 3}, GENERATE)
    found = pickle.loads(request.prompt or b"")
    assert np.array_equal(found.pop("multi_modal_data")["image"], picture)
    assert found == {"prompt": "<image>", "mm_processor_kwargs": {"fps": 2}}
    assert json.loads(request.body) == {"prompt": "", "max_tokens": 3, "return_token_ids": True}


@pytest.mark.parity("D9")
def test_an_engines_own_prompt_with_tools_is_a_chat():
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = build_request({"prompt": {"prompt_token_ids": np.array([1])}, "tools": tools}, GENERATE)
    assert request.path == CHAT
    assert pickle.loads(request.prompt or b"") == {"prompt_token_ids": [1]}
    assert json.loads(request.body)["messages"] == ""


@pytest.mark.parametrize("name", ["input", "prompt"])
@pytest.mark.parity("D6")
def test_each_pooling_task_has_its_endpoint(name: str):
    assert body({name: "x"}, EMBED) == {"input": "x", "encoding_format": "base64"}
    assert build_request({name: "x"}, EMBED).path == "/v1/embeddings"
    request = build_request({name: "x", "pooling_params": {"use_activation": False}}, CLASSIFY)
    assert (request.path, request.body) == ("/classify", b'{"input":"x","use_activation":false}')


@pytest.mark.parity("D6")
def test_pooling_takes_ids_lists_of_one_and_messages():
    assert body({"prompt_token_ids": np.array([3, 4])}, EMBED)["input"] == [3, 4]
    assert body({"input": ["x"]}, EMBED)["input"] == "x"
    assert body({"input": [[3, 4]]}, EMBED)["input"] == [3, 4]
    assert body({"messages": MESSAGES}, CLASSIFY) == {"messages": MESSAGES}


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("query", "documents"), ("query", "document")])
@pytest.mark.parity("D6")
def test_a_score_is_of_two_texts(names: tuple[str, str]):
    request = build_request(dict(zip(names, ("a", ["b", "c"]), strict=True)), SCORE)
    assert (request.path, request.body) == ("/score", b'{"text_1":"a","text_2":["b","c"]}')


# -- parameters


@pytest.mark.parametrize("text", [{"messages": MESSAGES}, {"prompt": "Hi"}])
@pytest.mark.parametrize("ids", ["tokenized_prompt", "prompt_token_ids"])
def test_ids_win_over_the_text_that_a_tokenizer_left_beside_them(ids: str, text: Any):
    request = build_request({**text, ids: [1, 2]}, GENERATE)
    assert (request.path, json.loads(request.body)["prompt"]) == ("/v1/completions", [1, 2])


@pytest.mark.parity("D7")
def test_sampling_parameters_may_stand_together_or_alone():
    assert sent(sampling_params={"temperature": 0.5}, seed=1) == {"temperature": 0.5, "seed": 1}


def test_what_is_none_is_unset_but_not_inside():
    schema = {"type": "object", "default": None, "properties": {}}
    found = sent(sampling_params={"seed": None, "guided_json": schema}, temperature=None, tools=None)
    assert found == {"structured_outputs": {"json": schema}}


def test_vllms_own_logprobs_are_a_chats_and_a_completions():
    assert sent(sampling_params={"logprobs": 3}) == {"logprobs": True, "top_logprobs": 3}
    assert sent(logprobs=True, top_logprobs=2) == {"logprobs": True, "top_logprobs": 2}
    assert body({"prompt": "x", "sampling_params": {"logprobs": 0}})["logprobs"] == 0
    assert body({"prompt": "x", "logprobs": True, "top_logprobs": 2})["logprobs"] == 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 4}, {"max_tokens": 4}),
        ({"max_tokens": 4.0}, {"max_tokens": 4}),  # of a column with gaps
        (  # of a CSV file
            {"max_tokens": "4", "temperature": " 0.5", "ignore_eos": "True", "seed": "", "stop": "5"},
            {"max_tokens": 4, "temperature": 0.5, "ignore_eos": True, "stop": "5"},
        ),
        ({"top_k": np.int64(5), "top_p": np.float64(0.5)}, {"top_k": 5, "top_p": 0.5}),
        ({"guided_choice": ("a", "b")}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"guided_decoding": {"regex": "a"}}, {"structured_outputs": {"regex": "a"}}),
        ({"extra_args": {"x": 1}}, {"vllm_xargs": {"x": 1}}),
        ({"logit_bias": {5: 1.5}}, {"logit_bias": {"5": 1.5}}),
        ({"detokenize": False, "output_kind": 2, "stream": False}, {}),
        ({"stop": np.array(["a", "b"])}, {"stop": ["a", "b"]}),
        ({"seed": 2**62}, {"seed": 2**62}),
    ],
)
@pytest.mark.parity("D7")
def test_names_and_types_of_other_engines_are_understood(given: Any, expected: Any):
    assert sent(sampling_params=given) == expected


def test_defaults_hold_where_the_row_is_silent():
    defaults = {"sampling_params": {"temperature": 0, "max_tokens": 5}, "model": "base", "seed": 3}
    request = build_request({"messages": MESSAGES, "temperature": 1, "seed": None}, GENERATE, defaults)
    found = json.loads(request.body)
    assert (found["temperature"], found["max_tokens"], found["seed"]) == (1, 5, 3)
    assert request.model == "base"


def test_defaults_of_chats_mean_nothing_to_a_plain_prompt():
    defaults = {"chat_template_kwargs": {"enable_thinking": False}}
    assert "chat_template_kwargs" not in body({"prompt": "x"}, defaults=defaults)
    assert body({"messages": MESSAGES}, defaults=defaults)["chat_template_kwargs"] == {
        "enable_thinking": False
    }


def test_extra_body_goes_as_it_is():
    assert sent(extra_body={"service_tier": "flex", "nothing": None}) == {
        "service_tier": "flex",
        "nothing": None,
    }


class Answer(pydantic.BaseModel):
    city: str


@pytest.mark.parity("D7")
def test_a_pydantic_class_is_its_schema():
    asked = sent(response_format=Answer)["response_format"]
    assert asked["json_schema"] == {"name": "Answer", "schema": Answer.model_json_schema()}
    assert sent(structured_outputs={"json": Answer}) == {
        "structured_outputs": {"json": Answer.model_json_schema()}
    }


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"model": "base:a"}, "base:a"),
        ({"adapter": "a"}, "base:a"),
        ({"model": "other", "adapter": "a"}, "other:a"),
        ({"model": "base:a", "adapter": "a"}, "base:a"),
        ({"model": "a"}, "a"),
        ({}, None),
    ],
)
@pytest.mark.parity("D7")
def test_an_adapter_is_part_of_the_model(fields: Any, model: str | None):
    assert build_request({"prompt": "x"} | fields, Task(model="base")).model == model


@pytest.mark.parity("D7")
def test_where_one_model_is_served_another_name_is_its_adapter():
    alone = Task(model="base", alone=True)
    for name, model in (("a", "base:a"), ("base", "base"), ("base:a", "base:a")):
        assert build_request({"prompt": "x", "model": name}, alone).model == model


# -- values


class Colour(Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(["2026-01-02"], "datetime64[D]"), ["2026-01-02"]),
        (np.str_("é"), "é"),
        (pa.scalar({"a": [1, None]}), {"a": [1, None]}),
        (datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
        (b"text", "text"),
        (Decimal("0.1"), 0.1),
        (Decimal(2**70), 2**70),
        (Colour.RED, "red"),
        ((1, [None, {}], {}), [1, [None, {}], {}]),
        (-(2**63), -(2**63)),
    ],
)
@pytest.mark.parity("D7")
def test_values_of_other_libraries_become_json(value: Any, expected: Any):
    assert sent(chat_template_kwargs={"value": value}) == {"chat_template_kwargs": {"value": expected}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (float("nan"), "is nan, which JSON cannot hold"),
        (np.array([1, np.inf]), "[1] is inf"),
        (b"\xff", "has bytes that are not UTF-8"),
        ("\ud800", "lone surrogate"),
        ({1, 2}, "is a set, which JSON cannot hold"),
        (object(), "is an object"),
        (Decimal("0.1234567890123456789"), "no JSON number represents exactly"),
        ({None: 1}, "has the key None"),
        (np.datetime64("NaT"), "NaT"),
        (int, "is the class int"),
    ],
)
@pytest.mark.parity("D15")
def test_what_json_cannot_hold_is_refused_by_its_place(value: Any, said: str):
    sentence = refusal({"messages": MESSAGES, "chat_template_kwargs": {"value": value}})
    assert sentence.startswith("chat_template_kwargs.value")
    assert said in sentence


def test_what_holds_itself_is_refused():
    held: list[Any] = []
    held.append(held)
    assert "contains itself" in refusal({"messages": MESSAGES, "chat_template_kwargs": {"value": held}})


def thing(draw: random.Random, depth: int = 3) -> Any:
    """A JSON value of any shape."""
    kinds = ["none", "bool", "int", "float", "text"] + ["list", "dict"] * depth
    match draw.choice(kinds):
        case "none":
            return None
        case "bool":
            return draw.random() < 0.5
        case "int":
            return draw.choice([0, -1, 2**53 + 1, -(2**63), 10**30])
        case "float":
            return draw.choice([0.1, -1e-300, 1e300, draw.random()])
        case "text":
            return "".join(draw.choices('aé"\\\n😀\0', k=draw.randint(0, 9)))
        case "list":
            return [thing(draw, depth - 1) for _ in range(draw.randint(0, 4))]
        case _:
            return {f"k{draw.randint(0, 5)}": thing(draw, depth - 1) for _ in range(draw.randint(0, 4))}


@pytest.mark.parity("D7")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_shapes_rows_have_each_arrives_as_it_was(seed: int):
    draw = random.Random(seed)
    tools = [{"type": "function", "function": thing(draw)}]
    options = {"value": thing(draw)}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": thing(draw)}}
    found = sent(tools=tools, chat_template_kwargs=options, response_format=schema)
    assert found == {"tools": tools, "chat_template_kwargs": options, "response_format": schema}
    assert list(found["chat_template_kwargs"]) == list(options)


# -- refusals


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "The row has no `messages`, `prompt` or `prompt_token_ids`; it has nothing."),
        ({"text": "x"}, "it has text."),
        ({"prompt": None}, "The row has no `messages`"),
        ({"mesages": MESSAGES}, "mesages is not known: did you mean messages?"),
        ({"prompt": "x", "sampling_param": {}}, "sampling_param is not known: did you mean sampling_params?"),
        ({"prompt": "x", "temprature": 1}, "temprature is not known: did you mean temperature?"),
        (
            {"prompt": "x", "sampling_params": {"max_token": 1}},
            "sampling_params.max_token is not known: did you",
        ),
        ({"prompt": "x", "sampling_params": {"beam": 1}}, "sampling_params.beam is not known; known are "),
        ({"prompt": "x", "sampling_params": [1]}, "sampling_params is a list; it must be a dict."),
        (
            {"prompt": "x", "sampling_params": {1: 2}},
            "sampling_params has the key 1, an int; keys must be strings.",
        ),
        ({"prompt": "x", "sampling_params": "{x"}, "sampling_params is not valid JSON"),
        ({"prompt": "x", "temperature": "hot"}, "temperature is 'hot', a str; it must be a number."),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens is 1.5, a float; it must be a whole number."),
        ({"prompt": "x", "max_tokens": True}, "max_tokens is True, a bool; it must be a whole number."),
        ({"prompt": "x", "stop": [1]}, "stop is [1], a list; it must be a string or a list of strings."),
        ({"prompt": "x", "ignore_eos": "yes"}, "ignore_eos is 'yes', a str; it must be true or false."),
        ({"prompt": "x", "seed": 1, "sampling_params": {"seed": 2}}, "seed is given twice, as 2 and as 1"),
        ({"prompt": "x", "stream": True}, "stream asks for a stream"),
        ({"prompt": "x", "extra_body": {"stream": True}}, "extra_body.stream asks for a stream"),
        ({"prompt": "x", "tools": []}, "tools goes with `messages`, not with `prompt`."),
        ({"messages": MESSAGES, "suffix": "x"}, "suffix goes with `prompt`, not with `messages`."),
        ({"messages": MESSAGES, "prompt": "x"}, "messages is given beside prompt; give only one of them."),
        ({"prompt": 5}, "prompt is an int; it must be a string, token ids, messages or an engine's dict."),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty; it must be a list of token ids."),
        ({"prompt_token_ids": [1.5]}, "it must be a list of whole numbers."),
        (
            {"prompt": {"prompt": "x", "multimodal": 1}},
            "prompt.multimodal is not known; an engine prompt has",
        ),
        ({"multi_modal_data": {}}, "multi_modal_data needs a `prompt` beside it"),
        ({"prompt": {"prompt": "x", "multi_modal_data": lambda: 1}}, "prompt cannot be sent"),
        ({"prompt": "x", "adapter": "a"}, "adapter is 'a', but of no known model"),
        ({"prompt": "x", "model": 3}, "model is an int; it must be a name."),
        (
            {"messages": MESSAGES, "response_format": "json"},
            "response_format is 'json', a str; it must be a dict.",
        ),
        ({"messages": MESSAGES, "tools": {"a": 1}}, "tools is {'a': 1}, a dict; it must be a list of dicts."),
    ],
)
@pytest.mark.parity("D15")
def test_a_bad_row_is_told_its_field_and_what_is_allowed(fields: Any, said: str):
    assert said in refusal(fields)


JUNK: list[Any] = [
    *(
        None,
        True,
        0,
        -1.5,
        10**400,
        float("nan"),
        1j,
        "",
        "x",
        "{",
        "[1]",
        '{"a": 1}',
        b"",
        b"\xff",
        object(),
        int,
    ),
    *(
        [],
        [[]],
        [1],
        [1, "a"],
        {},
        {1: 2},
        {None: 1},
        {1, 2},
        (),
        np.array([]),
        np.array(5),
        np.array([{}], object),
    ),
    *(pa.scalar(None), pa.scalar([1]), {"prompt": 1}, {"prompt_token_ids": "x"}, lambda: 1),
    *(
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image", "image": np.zeros((0, 0), np.uint8)}]}],
    ),
    *(
        [{"role": "user", "content": [{"type": kind, kind: {}}]}]
        for kind in ("image", "video", "input_audio")
    ),
]


@pytest.mark.parity("D15")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_row_holds_it_is_a_request_or_refused(kind: Any):
    draw, refused = random.Random(kind), 0
    names = [*INPUTS[kind], *PARAMETERS[kind], "sampling_params", "pooling_params", "model", "extra_body", 5]
    for _ in range(3000):
        fields = {draw.choice(names): draw.choice(JUNK) for _ in range(3)}
        try:
            build_request({draw.choice(INPUTS[kind]): "x"} | fields, Task(kind))
        except BadRequest:
            refused += 1
    assert 0 < refused < 3000


@pytest.mark.parametrize(
    ("fields", "task", "said"),
    [
        ({"text": "x"}, EMBED, "The row has no `input` (or `prompt`, `messages`, `prompt_token_ids`)"),
        (
            {"input": ["a", "b"]},
            EMBED,
            "input must be one string, or the token ids of one: a row has one input.",
        ),
        ({"input": "a", "prompt": "b"}, EMBED, "input is given beside prompt"),
        ({"text_1": "a"}, SCORE, "text_2 is missing (or `documents`)"),
        ({"text_1": "a", "query": "b", "text_2": "c"}, SCORE, "query is given beside another `text_1`"),
        ({"text_1": "a", "text_2": []}, SCORE, "text_2 is empty"),
        (
            {"text_1": 1, "text_2": "b"},
            SCORE,
            "text_1 is 1, an int; it must be a string or a list of strings",
        ),
    ],
)
@pytest.mark.parity("D15")
def test_a_bad_row_of_a_pooling_task_is_told_the_same(fields: Any, task: Task, said: str):
    assert said in refusal(fields, task)


def test_the_error_names_the_field_as_a_fact():
    with pytest.raises(BadRequest) as caught:
        build_request({"prompt": "x", "temperature": "hot"}, GENERATE)
    assert caught.value.facts == {"param": "temperature"}


def test_a_task_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="no task 'rank'; there are generate, embed, classify, score"):
        Task("rank")  # pyright: ignore[reportArgumentType]


# -- what is the request's, and what the row's


def test_columns_of_the_row_stay_its_own():
    given = {"messages", "temperature", "id", "document", "user", "speed", "task", "guided_json"}
    assert request_columns(given, GENERATE) == {"messages", "temperature", "guided_json"}
    assert sent(id=7, document="d", user="u", speed=1, task="t") == {}


# -- lines of an OpenAI batch file


def line(**fields: Any) -> dict[str, Any]:
    return {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "m", "input": "x"},
    } | fields


def test_a_line_of_a_batch_file_goes_as_it_is():
    request = build_request(line(), GENERATE)
    assert (request.path, request.body, request.model) == ("/v1/embeddings", b'{"input":"x"}', "m")
    assert build_request(line(body='{"input": "x", "stream": false}'), GENERATE).body == b'{"input":"x"}'
    assert request_columns(line() | {"note": 1}, GENERATE) == {"custom_id", "method", "url", "body"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "GET"}, "method is 'GET'; it must be POST."),
        (
            {"url": "/v1/embedding"},
            "url is '/v1/embedding', which is not a batch endpoint; did you mean /v1/embeddings?",
        ),
        ({"url": 7}, "url is 7, which is not a batch endpoint"),
        ({"body": None}, "body is None; it must be a JSON object"),
        ({"body": {"model": 1}}, "body.model is an int; it must be a string."),
        ({"body": {"stream": True}}, "body.stream asks for a stream"),
        ({"body": {"background": True}}, "body.background asks to answer later"),
    ],
)
@pytest.mark.parity("D15")
def test_a_bad_line_is_told_why(fields: Any, said: str):
    assert said in refusal(line(**fields))
