"""Answers as columns: one schema for each task, whatever came back and from whom."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from penstock.data.results.columns import ERROR, result_columns, result_schema
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.rows.request import KINDS, Task

GENERATE = Task()


def ok(body: Any) -> Outcome:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Outcome(state="ok", body=msgspec.Raw(raw), attempts=2, waited_s=0.5, took_s=1.5)


def generated(*choices: Any, **more: Any) -> dict[str, Any]:
    return result_columns(GENERATE, ok({"choices": [{"index": i} | c for i, c in enumerate(choices)]} | more))


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content} | more, "finish_reason": "stop"}


FAILED = Outcome(
    state="failed",
    attempts=3,
    failure=Failure(code="timeout", message="Too late.", stage="engine", attempts=3, status=504),
)


@pytest.mark.parity("D10")
def test_a_chat_gives_text_reason_counts_and_times():
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    row = generated(said("Hi") | {"token_ids": [7, 8]}, usage=usage, prompt_token_ids=[1] * 9)
    assert row["generated_text"] == "Hi"
    assert row["generated_texts"] == ["Hi"]
    assert (row["generated_tokens"], row["prompt_token_ids"]) == ([7, 8], [1] * 9)
    assert (row["finish_reason"], row["finish_reasons"]) == ("stop", ["stop"])
    assert [row[f"num_{name}_tokens"] for name in ("input", "cached", "generated")] == [9, 4, 2]
    assert (row["attempts"], row["waited_s"], row["time_taken_llm"], row["error"]) == (2, 0.5, 1.5, None)


@pytest.mark.parity("D10")
def test_all_of_several_outputs_are_there_in_their_order():
    row = result_columns(
        GENERATE,
        ok({"choices": [{"index": 1, "text": "b", "finish_reason": "length"}, {"index": 0, "text": "a"}]}),
    )
    assert row["generated_text"] == "a"
    assert row["generated_texts"] == ["a", "b"]
    assert row["finish_reasons"] == [None, "length"]
    assert [output["text"] for output in row["outputs"]] == ["a", "b"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parity("D10")
def test_thoughts_are_found_under_both_names(name: str):
    row = generated(said("5", **{name: "2 and 3"}))
    assert (row["reasoning"], row["generated_text"]) == ("2 and 3", "5")


@pytest.mark.parity("D10")
def test_tool_calls_without_content_are_calls_and_an_empty_text():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    other = {"id": "c2", "function": {"name": "g", "arguments": {"b": 2}}}
    row = generated(said(None, tool_calls=[call, other]))
    assert row["generated_text"] == ""
    assert row["tool_calls"] == [
        {"id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"id": "c2", "name": "g", "arguments": '{"b":2}'},
    ]


@pytest.mark.parity("D10")
def test_logprobs_of_chats_and_completions_have_one_form():
    top = [{"token": "a", "logprob": -0.1, "bytes": [97]}, {"token": "b", "logprob": -9999.0}]
    content = [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": top}]
    chat = generated(said("a") | {"logprobs": {"content": content}, "token_ids": [5]})
    listed = {"tokens": ["a"], "token_logprobs": [-0.1], "top_logprobs": [{"a": -0.1, "b": -9999.0}]}
    completion = generated({"text": "a", "logprobs": listed | {"text_offset": [0]}, "token_ids": [5]})
    likely = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -9999.0}]
    expected = [{"token": "a", "token_id": 5, "logprob": -0.1, "top_logprobs": likely}]
    assert chat["logprobs"] == completion["logprobs"] == expected


def test_logprobs_of_the_prompt_are_lists_without_the_first():
    told = {"17": {"logprob": -2.0, "rank": 3, "decoded_token": "x"}}
    row = generated({"text": "a", "prompt_logprobs": [None, told]})
    assert row["prompt_logprobs"] == [None, [{"token_id": 17, "token": "x", "logprob": -2.0, "rank": 3}]]


@pytest.mark.parity("D10")
def test_a_bare_answer_of_openai_leaves_what_it_lacks_empty():
    row = generated(said("Hi"), usage={"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4})
    missing = ("generated_tokens", "prompt_token_ids", "num_cached_tokens", "logprobs", "tool_calls")
    assert [row[name] for name in missing] == [None] * 5
    assert row["num_input_tokens"] == 3


def test_a_refusal_is_told():
    assert generated(said(None, refusal="I must not."))["refusal"] == "I must not."


@pytest.mark.parity("D6")
def test_base64_and_numbers_are_the_same_vector():
    numbers = np.array([0.1, -2.5, 3e-8], np.float32)
    encoded = base64.b64encode(numbers.tobytes()).decode()
    for given in (encoded, numbers.tolist()):
        row = result_columns(
            Task("embed"), ok({"data": [{"embedding": given}], "usage": {"prompt_tokens": 2}})
        )
        assert np.array_equal(np.array(row["embeddings"], np.float32), numbers)
        assert row["num_input_tokens"] == 2


@pytest.mark.parity("D6")
def test_classes_and_scores():
    judged = result_columns(Task("classify"), ok({"data": [{"label": "good", "probs": [0.1, 0.9]}]}))
    assert (judged["label"], judged["probs"], judged["embeddings"]) == ("good", [0.1, 0.9], [0.1, 0.9])
    scored = result_columns(Task("score"), ok({"data": [{"score": 0.5}, {"score": 0.25}]}))
    assert (scored["score"], scored["scores"]) == (0.5, [0.5, 0.25])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parity("D11")
def test_a_failed_row_has_the_same_columns_and_its_error(kind: Any):
    row = result_columns(Task(kind), FAILED)
    assert list(row) == result_schema(Task(kind)).names
    assert row["error"] == {
        "code": "timeout",
        "message": "Too late.",
        "stage": "engine",
        "attempts": 3,
        "status": 504,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"choices": [], "data": []}', b'{"choices": 1}'])
@pytest.mark.parity("D11")
def test_an_answer_of_another_form_is_an_error_in_the_same_columns(kind: Any, body: bytes):
    row = result_columns(Task(kind), ok(body))
    assert list(row) == result_schema(Task(kind)).names
    assert row["error"]["code"] == "bad_answer"


@pytest.mark.parametrize(
    "choice",
    [
        {"token_ids": [10**30]},
        {"token_ids": ["a"]},
        {"prompt_logprobs": [{"1": {"rank": []}}]},
        {"prompt_logprobs": [{"a": {}}]},
        {"logprobs": {"content": [{"logprob": "low"}]}},
        {"message": {"tool_calls": [{"function": {"name": {}}}]}},
    ],
)
@pytest.mark.parity("D11")
def test_what_no_column_can_hold_is_an_error(choice: Any):
    row = generated({"text": "x"} | choice)
    assert row["error"]["code"] == "bad_answer"
    assert pa.Table.from_pylist([row], schema=result_schema(GENERATE)).num_rows == 1


@pytest.mark.parity("D11")
def test_all_rows_of_a_task_fit_one_schema():
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    token = {"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "a", "logprob": -1.0}]}
    rows = [
        result_columns(GENERATE, FAILED),
        result_columns(GENERATE, Outcome(state="skipped")),
        generated(said(None, tool_calls=[call])),
        generated(said("a") | {"logprobs": {"content": [token]}}, said("b"), said("c")),
        generated({"text": "x", "token_ids": [2**31], "prompt_logprobs": [None]}),
    ]
    table = pa.Table.from_pylist(rows, schema=result_schema(GENERATE))
    assert table.to_pylist() == rows
    alone = pa.Table.from_pylist(rows[:1], schema=result_schema(GENERATE))
    assert pa.concat_tables([table, alone]).num_rows == 6
    assert alone.schema.field("error").type == ERROR
