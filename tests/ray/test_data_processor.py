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
)
from penstock.data.results.columns import ERROR

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


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return str(tmp_path_factory.mktemp("rows") / "journal")


KINDS = {
    "raises": lambda: 1 / 0,
    "no dict": lambda: "hello",
    "no role": lambda: {"messages": [{"role": "robot", "content": "x"}]},
    "typo": lambda: {"message": [{"role": "user", "content": "x"}]},
    "too long": lambda: {"prompt": "x " * 2_000},
    "wrong type": lambda: {"prompt": "x", "max_tokens": "many"},
    "shape 1": lambda: {"prompt": "a", "max_tokens": 3},
    "shape 2": lambda: {"prompt": "b", "stop": ["x"], "sampling_params": {"temperature": 0.5}},
    "shape 3": lambda: {"messages": [{"role": "user", "content": [{"type": "text", "text": "c"}]}], "n": 3},
    "shape 4": lambda: {"prompt": "d", "sampling_params": {"min_tokens": 0, "max_tokens": 2}},
}


def odd(row):
    """Whatever users may make of a row: requests of many shapes, mistakes, and what raises."""
    return KINDS.get(row["item"], lambda: ask(row))()


def picky(row):
    if row["item"] == "bad afterwards":
        raise KeyError("no b")
    return dict(row)


@pytest.fixture(scope="module")
def mixed(journal):
    """Rows of all kinds through one pipeline, some of them twice, by their item."""
    items = ["good", *KINDS, "bad afterwards", "good", "good too"]
    config = engines(journal=journal)
    rows = build_processor(config, preprocess=odd, postprocess=picky)([{"item": item} for item in items])
    assert [row["item"] for row in rows] == items
    return {row["item"]: row for row in rows}


@pytest.mark.parity("D11", "D15")
def test_bad_rows_fail_alone_with_their_input_and_the_reason(mixed):
    ends = {
        item: row["error"] and (row["error"]["stage"], row["error"]["code"]) for item, row in mixed.items()
    }
    assert {item: end for item, end in ends.items() if "shape" not in item} == {
        "good": None,
        "raises": ("preprocess", "own_code_failed"),
        "no dict": ("preprocess", "invalid_request"),
        "no role": ("preprocess", "invalid_request"),
        "typo": ("preprocess", "invalid_request"),
        "too long": ("engine", "context_length_exceeded"),
        "wrong type": ("preprocess", "invalid_request"),
        "bad afterwards": ("postprocess", "own_code_failed"),
        "good too": None,
    }


def test_postprocess_that_raises_fails_its_row_only(mixed):
    said = [mixed[item].get("generated_text") for item in ("good", "good too")]
    assert (said, mixed["bad afterwards"]["error"]["stage"]) == (["good", "good too"], "postprocess")


@pytest.mark.parity("D7")
def test_rows_of_different_shape_do_not_touch_each_other(mixed):
    rows = [mixed[f"shape {number}"] for number in (1, 2, 3, 4)]
    assert [row["error"] for row in rows] == [None] * 4
    assert [len(row["generated_texts"]) for row in rows] == [1, 1, 3, 1]


@pytest.mark.parity("X5", "X20")
def test_a_pipeline_run_again_answers_from_its_journal(mixed, journal):
    rows = build_processor(engines(journal=journal), preprocess=odd)(
        [{"item": item} for item in ("shape 1", "good too", "more")]
    )
    kept = [row["time_taken_llm"] == mixed[row["item"]]["time_taken_llm"] for row in rows[:2]]
    assert (kept, rows[2]["generated_text"]) == ([True, True], "more")


def test_a_failed_row_ends_the_pipeline_where_that_is_wanted():
    processor = build_processor(engines(should_continue_on_error=False), preprocess=lambda row: {"prompt": 1})
    with pytest.raises(Exception, match="A row failed in preprocess"):
        processor([{"item": "a"}])


@pytest.fixture(scope="module")
def chained():
    """Two stages: a batch function, which skips a row where failed ones end the pipeline, and a class."""

    @batched
    def all_of_them(rows):
        many = len(rows) > 1
        return [{"prompt": f"{row['item']} of {many}"} if row["item"] != "b" else None for row in rows]

    class Counter:
        def __init__(self):
            self.seen = 0

        def __call__(self, row):
            self.seen += 1
            return {"prompt": f"{row['answer']} {self.seen}"}

    first = build_llm_processor(
        engines(should_continue_on_error=False),
        preprocess=all_of_them,
        postprocess=lambda row: dict(answer=row["generated_text"], **row),
    )
    second = build_processor(engines(), preprocess=Counter, preprocess_map_kwargs={"num_cpus": 0.5})
    rows = second(first(ray.data.from_items(["a", "b", "c"]))).take(3)
    return sorted(rows, key=lambda row: row["item"])


def test_the_older_name_and_a_lambda_as_in_the_announcement(chained):
    assert [row["item"] for row in chained] == ["a", "b", "c"]
    assert [row["answer"] for row in chained] == ["a of True", None, "c of True"]


def test_a_row_of_which_preprocess_makes_nothing_is_skipped(chained):
    assert [row["original_error"] for row in chained] == [None] * 3
    assert [row["original_attempts"] for row in chained] == [1, 0, 1]
    assert [row["original_generated_text"] for row in chained] == ["a of True", None, "c of True"]


def test_a_batch_function_gets_many_rows_and_returns_as_many(chained):
    assert [chained[0]["answer"], chained[2]["answer"]] == ["a of True", "c of True"]


def test_a_class_is_made_once_and_has_its_own_resources(chained):
    assert sorted(int(row["generated_text"].split()[-1]) for row in chained) == [1, 2, 3]


@pytest.mark.parity("D8")
def test_sequential_processors_have_engines_of_their_own(chained):
    texts = [row["generated_text"].rsplit(" ", 1)[0] for row in chained]
    assert texts == ["a of True", "None", "c of True"]


def test_nothing_in_is_nothing_out():
    processor = build_processor(engines(), preprocess=ask)
    assert processor([]) == []
    assert processor(ray.data.from_items([])).take_all() == []
    table = processor(pd.DataFrame({"item": []}))
    assert (len(table), {"item", "generated_text", "error"} <= set(table.columns)) == (0, True)


async def two_engines(folder):
    """Returns when rows are in two engines; one takes 128 at most."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.iterdir())) < 2:  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.5)  # all of them look


@pytest.fixture(scope="module")
def programmed(tmp_path_factory):
    """A data frame through a program, in two engines that start at once."""
    folder = tmp_path_factory.mktemp("engines")

    async def twice(row, llm):
        await two_engines(folder)
        if row["item"] == "bad":
            raise LookupError("nothing about bad")
        first = await llm.chat(row["item"], max_tokens=20)
        second = await llm.complete(first.text + " again", max_tokens=20)
        return {"said": second.text}

    items = ["bad", *(f"row {n}" for n in range(299))]
    processor = build_processor(engines(concurrency=2, batch_size=2), program=twice)
    return processor(pd.DataFrame({"item": items}))


@pytest.mark.parity("D13")
def test_engines_start_at_once(programmed):
    assert len(programmed) == 300  # no row ends before there are two


def test_a_data_frame_stays_one(programmed):
    assert isinstance(programmed, pd.DataFrame)
    assert set(programmed["item"]) == {"bad", *(f"row {n}" for n in range(299))}


@pytest.mark.parity("X20")
def test_a_program_asks_as_often_as_it_likes_for_one_row(programmed):
    good = programmed[programmed["item"] != "bad"]
    assert list(good["said"]) == [f"{item} again" for item in good["item"]]
    assert set(good["calls"]) == {2}
    assert good["error"].isna().all()


@pytest.mark.parity("X20")
def test_a_program_that_raises_fails_its_row_only(programmed):
    (bad,) = programmed[programmed["item"] == "bad"].to_dict("records")
    assert "nothing about bad" in bad["error"]["message"]


@pytest.mark.parity("D13")
def test_engines_start_when_rows_wait(tmp_path):
    async def together(row, llm):
        await two_engines(tmp_path)
        return {"said": (await llm.complete(row["item"], max_tokens=20)).text}

    config = engines(concurrency=(1, 2), batch_size=2)
    rows = build_processor(config, program=together)([{"item": f"row {n}"} for n in range(300)])
    assert [row["said"] for row in rows] == [f"row {n}" for n in range(300)]


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
