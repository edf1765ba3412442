"""What `penstock.LLM` (with a simulated engine) and `penstock.batch` make of tables, and what they refuse."""

import datetime
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock.config import LLMConfig, ModelLoadingConfig
from penstock.data.execution.window import Window
from penstock.data.results.outcome import Outcome
from penstock.data.rows.request import RowRequest
from penstock.data.table import frames
from penstock.errors import BadRequest, ConfigError, Unavailable

SIMULATED = LLMConfig(
    model_loading_config=ModelLoadingConfig(model_id="sim"),
    llm_engine="sim",
    engine_kwargs={"step_base_ms": 0, "prefill_tokens_per_s": 1e9},
)


@pytest.fixture(scope="module")
def llm() -> Iterator[penstock.LLM]:
    with penstock.LLM(config=SIMULATED) as llm:
        yield llm


TABLES: dict[str, Callable[[dict[str, list[Any]]], Any]] = {
    "pandas": pd.DataFrame,
    "polars": lambda columns: pl.DataFrame(columns, strict=False),
    "Arrow": pa.table,
    "dict": dict,
    "list": lambda columns: [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ],
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_a_misspelt_column_is_refused_before_anything_is_asked(llm: penstock.LLM, make: Any):
    table = make({"text": ["a"], "price": [1]})
    with pytest.raises(
        ConfigError, match=r"names the column 'txt'; the input has 'text', 'price'\. Did you mean 'text'"
    ):
        llm.map(table, "About {txt}")
    with pytest.raises(ConfigError, match=r"The system prompt names the column 'json'.* write \{\{ or \}\}"):
        llm.map(table, "{text}", system="Answer as {json}")


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_a_table_without_a_prompt_is_refused(llm: penstock.LLM, make: Any):
    with pytest.raises(ConfigError, match=r"needs a prompt .*; it has 'text', 'price'"):
        llm.map(make({"text": ["a"], "price": [1]}))


def test_the_columns_that_the_prompt_does_not_name_may_be_anything(llm: penstock.LLM):
    frame = pd.DataFrame({"text": ["a", "b"], "odd": [1, {"x"}], "n": [1, 2]})
    frame.columns = ["text", "odd", "odd"]
    assert list(llm.map(frame, "{text}")) == ["a", "b"]
    with pytest.raises(ConfigError, match="names the column 'odd', of which there are several"):
        llm.map(frame, "{odd}")
    with pytest.raises(ConfigError, match="must name a column"):
        llm.map(frame, "What?")
    odd = pl.DataFrame({"text": ["a"], "odd": pl.Series([object()], dtype=pl.Object)})
    assert llm.map(odd, "{text}").to_list() == ["a"]


def test_a_column_of_several_types_is_asked_value_by_value(llm: penstock.LLM):
    frame = pd.DataFrame({"n": [1, "two", None, float("nan"), 2.5], "day": datetime.date(2026, 1, 2)})
    assert list(llm.map(frame, "{n}")) == ["1", "two", None, None, "2.5"]
    assert llm.map(frame, "{day}")[0] == "2026-01-02"
    mixed = pl.DataFrame({"n": pl.Series([1, "two"], dtype=pl.Object)})
    assert llm.map(mixed, "{n}").to_list() == ["1", "two"]


def test_what_has_no_rows_with_columns_says_what_to_do(llm: penstock.LLM):
    levels = pd.DataFrame([[1, 2]], columns=pd.MultiIndex.from_tuples([("a", "x"), ("a", "y")]))
    for refused, says in (
        (levels, "MultiIndex"),
        (pl.LazyFrame({"a": [1]}), r"call \.collect\(\)"),
        (["What?"], "A row is 'What\\?'"),
        (pl.Series(["a"]), "A Series is no table"),
        (pd.Series(["a"]), "A Series is no table"),
        (7, "A int is no table"),
    ):
        with pytest.raises(ConfigError, match=says):
            llm.map(refused, "{a}")
        with pytest.raises(ConfigError, match=says):
            penstock.batch(refused, "{a}", model=penstock.demo_model())
    for refused, says in (
        (pl.LazyFrame({"a": [1]}), "collect"),
        ("What?", "`ask` takes one"),
        (7, "no table"),
    ):
        with pytest.raises(ConfigError, match=says):
            llm.map(refused)


QUESTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "iterator": iter,
    "pandas": pd.Series,
    "polars": pl.Series,
    "Arrow": pa.array,
}


@pytest.mark.parametrize("make", QUESTIONS.values(), ids=QUESTIONS)
def test_questions_that_are_missing_are_not_asked(llm: penstock.LLM, make: Any):
    assert list(llm.map(make(["a", None, " ", "b"]))) == ["a", None, None, "b"]


def test_system_goes_before_each_question(llm: penstock.LLM, patched):
    asked: list[Any] = []
    send = llm._window.run

    async def run(request: Any) -> Any:
        asked.append(request.body)
        return await send(request)

    patched(llm._window, "run", run)
    conversation = [{"role": "user", "content": "b"}]
    assert llm.map(["a", conversation], system="Be {brief}.") == ["a", "b"]
    assert all(
        b'"messages":[{"role":"system","content":"Be {brief}."},{"role":"user"' in one for one in asked
    )
    asked.clear()
    with pytest.raises(ConfigError, match="Row 1 has a system message of its own"):
        llm.map(["a", [{"role": "system", "content": "x"}, *conversation]], system="Be brief.")
    assert not asked


def test_more_than_one_answer_to_a_question_is_refused(llm: penstock.LLM):
    for call in (
        lambda: llm.ask("a", n=2),
        lambda: llm.map(["a"], sampling_params={"n": 2}),
        lambda: penstock.batch([{"a": 1}], "{a}", model=penstock.demo_model(), params={"n": 2}),
    ):
        with pytest.raises(BadRequest, match="n is 2; each question has one answer"):
            call()
    assert llm.ask("a", n=1) == "a"


@pytest.mark.parametrize("schema", [int, 5, "{}", ["a"]], ids=repr)
def test_what_is_no_schema_is_refused(llm: penstock.LLM, schema: Any):
    for call in (
        lambda: llm.ask("a", schema=schema),
        lambda: llm.map(["a"], schema=schema),
        lambda: penstock.batch([{"a": 1}], "{a}", model=penstock.demo_model(), schema=schema),
    ):
        with pytest.raises(ConfigError, match=r"The schema is .*; give a Pydantic class or a JSON schema"):
            call()


def test_models_that_cannot_start_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    for model, says in (
        (5, "The model is 5; name a folder or a hub id"),
        ("./my-modle", "does not exist on this machine. Did you mean '.*my-model'"),
        (Path("my-modle").absolute(), "Did you mean '.*my-model'"),
        ("my-model", "config.json"),
    ):
        given: Any = model
        with pytest.raises(ConfigError, match=says):
            penstock.LLM(given)
        with pytest.raises(ConfigError, match=says):
            penstock.batch([{"a": 1}], "{a}", model=given)


def test_arguments_that_have_no_effect_are_refused():
    refused: list[dict[str, Any]] = [{"model": "m"}, {"url": "http://127.0.0.1:9"}, {"max_model_len": 8}]
    for given in refused:
        with pytest.raises(ConfigError, match=f"{next(iter(given))}: not beside `config`"):
            penstock.LLM(config=SIMULATED, **given)
    with pytest.raises(ConfigError, match="max_model_len: of an engine"):
        penstock.batch([{"a": 1}], "{a}", url="http://127.0.0.1:9", max_model_len=8)


def test_what_a_file_cannot_hold_is_refused_with_its_column():
    frame = pd.DataFrame({"a": [1, "x"], "b": [1, 2]})
    with pytest.raises(ConfigError, match="The column 'a' has values of several types"):
        penstock.batch(frame, "{b}", model=penstock.demo_model())
    frame.columns = ["b", "b"]
    with pytest.raises(ConfigError, match="several columns 'b'"):
        penstock.batch(frame, "{b}", model=penstock.demo_model())


def test_a_list_has_the_columns_of_all_its_rows():
    assert frames.arrow([{"a": 1}, {"b": 2}]).to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_a_refused_table_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError):
        penstock.batch(7, "{a}", model=penstock.demo_model())
    assert not list(tmp_path.iterdir())


def test_an_answer_of_a_service_that_leaves_fields_out_is_read_or_fails_its_row_alone(monkeypatch):
    bodies = iter(
        [
            b'{"choices": [{"message": {"role": "assistant"}}]}',
            b'{"choices": [{"message": {"content": [{"type": "text", "text": "in parts"}]}}]}',
            b'{"error": "no model"}',
        ]
    )

    async def run(window: Window, request: RowRequest) -> Outcome:
        return Outcome(state="ok", body=msgspec.Raw(next(bodies)))

    monkeypatch.setattr(Window, "run", run)
    with (
        penstock.LLM(config=SIMULATED) as llm,
        pytest.warns(match="1 of 3 rows have no answer, such as row 2"),
    ):
        assert llm.map(["a", "b", "c"]) == ["", "in parts", None]


def test_a_row_whose_objects_break_fails_alone(llm: penstock.LLM):
    class Closed:
        def as_py(self) -> None:
            raise RuntimeError("It is closed.")

    picture = [{"role": "user", "content": [{"type": "image", "image": Closed()}]}]
    with pytest.warns(match="1 of 2 rows have no answer, such as row 1: RuntimeError: It is closed"):
        answers = llm.map(["a", picture], max_tokens=2)
    assert (isinstance(answers[0], str), answers[1]) == (True, None)


def test_a_table_that_was_not_written_whole_is_written_again(tmp_path: Path, monkeypatch, patched):
    def half(rows: Any, where: Any) -> None:
        (where if hasattr(where, "write") else where.open("wb")).write(b"PAR1")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    table = [{"a": "x"}]
    with monkeypatch.context() as full:
        full.setattr("pyarrow.parquet.write_table", half)
        with pytest.raises((Unavailable, OSError), match="No space left"):
            penstock.batch(table, "{a}", name="mine", url="http://127.0.0.1:9")
    asked: list[Any] = []
    patched("penstock.data.table.job.run", lambda source, *_, **__: asked.append(pq.read_table(source)))
    with suppress(AttributeError):  # there is no report
        penstock.batch(table, "{a}", name="mine", url="http://127.0.0.1:9")
    assert asked[0].to_pylist() == table


def test_fields_of_several_types_are_json_and_columns_of_their_names_get_others(patched):
    def run(source: str, output: str, **_: Any) -> None:
        answers = ['{"found": 1, "a": "x"}', '{"found": "two", "a": "y"}']
        pq.write_table(pa.table({"a": ["p", "q"], "answer": answers, "error": [None, None]}), output)

    patched("penstock.data.table.job.run", run)
    table, url = pd.DataFrame({"a": ["p", "q"]}), "http://127.0.0.1:9"
    found = penstock.batch(table, "{a}", url=url, schema={"properties": {"found": {}, "a": {}}})
    assert found.to_dict("list") == {
        "original_a": ["p", "q"],
        "found": ["1", '"two"'],
        "a": ["x", "y"],
        "error": [None, None],
    }
    with pytest.raises(ConfigError, match="a field 'error'"):
        penstock.batch(table, "{a}", url=url, schema={"properties": {"error": {}}})
