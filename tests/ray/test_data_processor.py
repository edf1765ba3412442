"""Processors on a real Ray Data: rows in, rows out, whatever the rows and the user's functions do."""

import asyncio
import os
import signal

import pandas as pd
import pytest
import ray

from penstock.data import (
    EngineProcessorConfig,
    LLMConfig,
    batched,
    build_llm_processor,
    build_processor,
    vLLMEngineProcessorConfig,
)
from penstock.data.columns import ERROR

pytestmark = [pytest.mark.usefixtures("serve_url"), pytest.mark.parity("D1")]

FREE = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": float("inf")}


def sim(**options):
    options = FREE | {"max_model_len": 512, "kv_tokens": 65536} | options
    return LLMConfig(model_loading_config={"model_id": "sim"}, llm_engine="sim", engine_kwargs=options)


def engines(batch_size=16, **options):
    return EngineProcessorConfig(llm_config=sim(), batch_size=batch_size, **options)


def ask(row):
    return {"messages": [{"role": "user", "content": row["item"]}], "max_tokens": 20}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    ray.data.DataContext.get_current().enable_progress_bars = False


@pytest.fixture(scope="module")
def answered():
    """Fifty rows with columns of many types through one pipeline with an async preprocess."""

    async def later(row):
        await asyncio.sleep(0)
        return ask(row)

    items = [
        {"item": f"row {n}", "n": n if n % 2 else None, "generated_text": f"mine {n}"} for n in range(50)
    ]
    processor = build_processor(engines(), preprocess=later)
    dataset = processor(ray.data.from_items(items))
    return sorted(dataset.take_all(), key=lambda row: int(row["item"].split()[1])), dataset.schema()


def test_every_row_comes_back_once_with_its_own_answer(answered):
    rows, _ = answered
    assert [row["generated_text"] for row in rows] == [f"row {n}" for n in range(50)]


def test_the_users_columns_stay_as_they_were(answered):
    rows, _ = answered
    assert [row["n"] for row in rows] == [n if n % 2 else None for n in range(50)]


@pytest.mark.parity("D10")
def test_a_column_with_the_name_of_ours_is_kept_beside_it(answered):
    rows, _ = answered
    assert rows[7]["original_generated_text"] == "mine 7"


@pytest.mark.parity("D11")
def test_error_has_one_type_though_no_row_failed(answered):
    rows, schema = answered
    assert {row["error"] for row in rows} == {None}
    assert dict(zip(schema.names, schema.types, strict=True))["error"] == ERROR


@pytest.mark.parity("D11", "D15")
def test_bad_rows_fail_alone_with_their_input_and_the_reason():
    def odd(row):
        kinds = {
            "raises": lambda: 1 / 0,
            "no dict": lambda: "hello",
            "no role": lambda: {"messages": [{"role": "robot", "content": "x"}]},
            "typo": lambda: {"message": [{"role": "user", "content": "x"}]},
            "too long": lambda: {"prompt": "x " * 2_000},
            "wrong type": lambda: {"prompt": "x", "max_tokens": "many"},
        }
        return kinds.get(row["item"], lambda: ask(row))()

    items = ["good", "raises", "no dict", "no role", "typo", "too long", "wrong type", "good too"]
    rows = build_processor(engines(), preprocess=odd, postprocess=lambda row: dict(row))(
        [{"item": item} for item in items]
    )
    ends = {row["item"]: row["error"] and (row["error"]["stage"], row["error"]["code"]) for row in rows}
    assert ends == {
        "good": None,
        "raises": ("preprocess", "own_code_failed"),
        "no dict": ("preprocess", "invalid_request"),
        "no role": ("preprocess", "invalid_request"),
        "typo": ("preprocess", "invalid_request"),
        "too long": ("engine", "context_length_exceeded"),
        "wrong type": ("preprocess", "invalid_request"),
        "good too": None,
    }


def test_a_row_of_which_preprocess_makes_nothing_is_skipped():
    rows = build_processor(
        engines(should_continue_on_error=False),
        preprocess=lambda row: ask(row) if row["item"] != "b" else None,
        postprocess=lambda row: {"item": row["item"], "said": row["generated_text"]},
    )([{"item": item} for item in "abc"])
    assert [(row["item"], row.get("said"), row["error"]) for row in rows] == [
        ("a", "a", None),
        ("b", None, None),
        ("c", "c", None),
    ]
    assert rows[1]["attempts"] == 0


def test_postprocess_that_raises_fails_its_row_only():
    def picky(row):
        if row["item"] == "b":
            raise KeyError("no b")
        return {"said": row["generated_text"]}

    rows = build_processor(engines(), preprocess=ask, postprocess=picky)([{"item": item} for item in "abc"])
    assert [row.get("said") for row in rows] == ["a", None, "c"]
    assert (rows[1]["item"], rows[1]["error"]["stage"]) == ("b", "postprocess")


def test_a_failed_row_ends_the_pipeline_where_that_is_wanted():
    processor = build_processor(engines(should_continue_on_error=False), preprocess=lambda row: {"prompt": 1})
    with pytest.raises(Exception, match="A row failed in preprocess"):
        processor([{"item": "a"}])


@pytest.mark.parity("D7")
def test_rows_of_different_shape_do_not_touch_each_other():
    shapes = [
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "b", "stop": ["x"], "sampling_params": {"temperature": 0.5}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "c"}]}], "n": 3},
        {"prompt": "d", "sampling_params": {"min_tokens": 0, "max_tokens": 2}},
    ]
    rows = build_processor(engines(), preprocess=lambda row: shapes[row["n"]])([{"n": n} for n in range(4)])
    assert [row["error"] for row in rows] == [None] * 4
    assert [len(row["generated_texts"]) for row in rows] == [1, 1, 3, 1]


def test_a_batch_function_gets_many_rows_and_returns_as_many():
    @batched
    def all_of_them(rows):
        return [{"prompt": f"{row['item']} of {len(rows) > 1}"} for row in rows]

    rows = build_processor(engines(), preprocess=all_of_them)([{"item": item} for item in "abc"])
    assert [row["generated_text"] for row in rows] == ["a of True", "b of True", "c of True"]


def test_a_class_is_made_once_and_has_its_own_resources():
    class Counter:
        def __init__(self):
            self.seen = 0

        def __call__(self, row):
            self.seen += 1
            return {"prompt": f"{row['item']}{self.seen}"}

    processor = build_processor(engines(), preprocess=Counter, preprocess_map_kwargs={"num_cpus": 0.5})
    rows = processor([{"item": item} for item in "abc"])
    assert [row["generated_text"] for row in rows] == ["a1", "b2", "c3"]


def test_a_data_frame_stays_one():
    frame = build_processor(
        engines(), preprocess=ask, postprocess=lambda row: {"said": row["generated_text"]}
    )(pd.DataFrame({"item": ["a", "b"]}))
    assert list(frame["said"]) == ["a", "b"]


def test_nothing_in_is_nothing_out():
    processor = build_processor(engines(), preprocess=ask)
    assert processor([]) == []
    assert processor(ray.data.from_items([])).take_all() == []


@pytest.mark.parity("D13")
@pytest.mark.parametrize("concurrency", [2, (1, 2)])
def test_engines_start_at_once_or_when_rows_wait(concurrency, tmp_path):
    """Each row waits until rows are in two engines; one takes 128 at most."""

    async def together(row, llm):
        (tmp_path / str(os.getpid())).touch()
        while len(list(tmp_path.iterdir())) < 2:  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.5)  # all of them look
        return {"said": (await llm.complete(row["item"], max_tokens=20)).text}

    config = engines(concurrency=concurrency, batch_size=2)
    rows = build_processor(config, program=together)([{"item": f"row {n}"} for n in range(300)])
    assert [row["said"] for row in rows] == [f"row {n}" for n in range(300)]


def test_the_older_name_and_a_lambda_as_in_the_announcement():
    processor = build_llm_processor(
        engines(), preprocess=ask, postprocess=lambda row: dict(answer=row["generated_text"], **row)
    )
    (row,) = processor(ray.data.from_items(["Hello"])).take(1)
    assert (row["answer"], row["item"]) == ("Hello", "Hello")


@pytest.mark.parity("D15")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model_source": "demo", "batchsize": 3}, "batch_size"),
        ({"model_source": "demo", "concurrency": 0}, "concurrency"),
        ({"model_source": "demo", "concurrency": (3, 2)}, "concurrency"),
        ({}, "model_source"),
        ({"model": "demo", "model_source": "demo"}, "one model"),
        ({"model": "demo", "task_type": "sing"}, "generate"),
    ],
)
def test_a_wrong_config_says_what_is_wrong(wrong, says):
    with pytest.raises(ValueError, match=says):
        vLLMEngineProcessorConfig(**wrong)


@pytest.mark.parity("D8")
def test_sequential_processors_have_engines_of_their_own():
    first = build_processor(
        engines(),
        preprocess=ask,
        postprocess=lambda row: {"item": row["generated_text"] + "!", "error_1": row["error"]},
    )
    second = build_processor(
        engines(), preprocess=ask, postprocess=lambda row: {"said": row["generated_text"]}
    )
    rows = second(first(ray.data.from_items(["a", "b"]))).take_all()
    assert sorted(row["said"] for row in rows) == ["a!", "b!"]


@pytest.mark.parity("X20")
def test_a_program_asks_as_often_as_it_likes_for_one_row():
    async def twice(row, llm):
        first = await llm.chat(row["item"], max_tokens=20)
        second = await llm.complete(first.text + " again", max_tokens=20)
        return {"said": second.text}

    rows = build_processor(engines(), program=twice)([{"item": item} for item in "ab"])
    assert [(row["item"], row["said"], row["calls"], row["error"]) for row in rows] == [
        ("a", "a again", 2, None),
        ("b", "b again", 2, None),
    ]


@pytest.mark.parity("X20")
def test_a_program_that_raises_fails_its_row_only():
    async def picky(row, llm):
        if row["item"] == "a":
            raise LookupError("nothing about a")
        return {"said": (await llm.complete(row["item"], max_tokens=5)).text}

    rows = build_processor(engines(), program=picky)([{"item": item} for item in "ab"])
    assert "nothing about a" in rows[0]["error"]["message"]
    assert (rows[1]["said"], rows[1]["error"]) == ("b", None)


@pytest.mark.parity("X5", "X20")
@pytest.mark.parametrize("again", ["same rows", "more rows"])
def test_a_pipeline_run_again_answers_from_its_journal(tmp_path, again):
    config = EngineProcessorConfig(llm_config=sim(reply="first"), journal=str(tmp_path / "journal"))
    first = build_processor(config, preprocess=ask)([{"item": item} for item in "aab"])
    config = EngineProcessorConfig(llm_config=sim(reply="second"), journal=str(tmp_path / "journal"))
    items = "aab" if again == "same rows" else "aabc"
    second = build_processor(config, preprocess=ask)([{"item": item} for item in items])
    assert [row["generated_text"] for row in first] == ["first"] * 3
    assert [row["generated_text"] for row in second] == ["first"] * 3 + ["second"] * (len(items) - 3)


@pytest.mark.parity("X5")
def test_rows_survive_the_death_of_their_actor(tmp_path):
    """The actor kills itself in the middle of the first batch; Ray Data runs the batch again elsewhere."""
    marker = tmp_path / "died"

    async def dies_once(row, llm):
        said = (await llm.complete(f"row {row['n']}", max_tokens=20)).text
        if row["n"] == 20 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"said": said}

    processor = build_processor(engines(journal=str(tmp_path / "journal")), program=dies_once)
    rows = processor([{"n": n} for n in range(40)])
    assert marker.exists()
    assert [(row["n"], row["said"], row["error"]) for row in rows] == [
        (n, f"row {n}", None) for n in range(40)
    ]
