"""`penstock.LLM`, `penstock.batch` and `penstock run` with a real engine in this process."""

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import polars as pl
import pytest
from pydantic import BaseModel

import penstock
from penstock.config import LLMConfig, ModelLoadingConfig
from penstock.errors import BadRequest, ConfigError, PromptTooLong, Unavailable


class Told(BaseModel):
    mood: Literal["good", "bad"]
    certain: bool


ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[penstock.LLM]:
    with penstock.LLM(penstock.demo_model(), **ENGINE) as llm:
        yield llm


def test_one_question_gets_a_text(llm: penstock.LLM):
    assert llm.ask("What is Penstock?", temperature=0).startswith("Penstock feeds LLM engines.")
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is Penstock?"},
    ]
    assert llm.ask(conversation, max_tokens=3)


def test_a_schema_gives_its_object(llm: penstock.LLM):
    assert llm.ask("How is it?", schema=Told, temperature=0).mood in ("good", "bad")
    assert llm.ask("How is it?", schema=Told.model_json_schema(), temperature=0).keys() == {"mood", "certain"}
    with pytest.raises(BadRequest, match="does not fit the schema: it was cut at max_tokens"):
        llm.ask("How is it?", schema=Told, max_tokens=2)


def test_a_refused_question_says_why(llm: penstock.LLM):
    with pytest.raises(BadRequest, match="max_tokens"):
        llm.ask("What?", max_tokens="many")
    with pytest.raises(PromptTooLong):
        llm.ask("x" * 20_000)
    with pytest.raises(BadRequest, match="not known"):
        llm.ask("What?", max_tokenss=3)


def test_a_column_beside_a_data_frame(llm: penstock.LLM):
    frame = pd.DataFrame({"text": ["Penstock", "prefix caching"], "n": [1, None]}, index=[7, 3])
    frame["answer"] = llm.map(frame, "What is {text}?", temperature=0)
    assert str(frame["answer"][7]).startswith("Penstock feeds LLM engines.")
    assert frame["answer"][3] == llm.ask("What is prefix caching?", temperature=0)
    polars = pl.DataFrame({"text": ["Penstock", "prefix caching"]})
    answers = llm.map(polars, "What is {text}?", temperature=0)
    assert isinstance(answers, pl.Series)
    assert answers.to_list() == frame["answer"].to_list()
    assert polars.with_columns(answer=answers).columns == ["text", "answer"]


def test_lists_in_lists_out(llm: penstock.LLM):
    assert llm.map(["What is Penstock?"] * 3, max_tokens=2, temperature=0) == llm.map(
        [{"it": "Penstock"}] * 3, "What is {it}?", max_tokens=2, temperature=0
    )
    assert llm.map([], "{a}") == []
    assert llm.map([{"a": None}, {"a": " "}], "{a}") == [None, None]
    moods = llm.map(["How is it?"] * 2, schema=Told)
    assert [type(mood) for mood in moods] == [Told, Told]


def test_a_row_without_an_answer_is_none_and_told_once(llm: penstock.LLM):
    rows = [{"it": "Penstock"}, {"other": 1}, {"it": "x" * 20_000}]
    with pytest.warns(UserWarning, match="2 of 3 rows have no answer, such as row 1: .* column 'it'"):
        first, second, third = llm.map(rows, "What is {it}?", max_tokens=2)
    assert first
    assert second is third is None


def test_neither_a_model_nor_a_service():
    with pytest.raises(ConfigError, match="Name a model"):
        penstock.LLM()
    with pytest.raises(ConfigError, match="max_model_len: of an engine"):
        penstock.LLM(url="http://127.0.0.1:9", max_model_len=8)
    with pytest.raises(Unavailable):
        penstock.LLM(url="http://127.0.0.1:9")


def test_a_closed_one_says_so():
    llm = penstock.LLM(config=_simulated())
    assert llm.map(["a", "b"]) == ["a", "b"]
    llm.close()
    llm.close()
    with pytest.raises(Unavailable, match="This LLM is closed"):
        llm.ask("a")


def _simulated() -> LLMConfig:
    return LLMConfig(model_loading_config=ModelLoadingConfig(model_id="sim"), llm_engine="sim")


SCRIPT = """
import pandas as pd, penstock
llm = penstock.LLM(penstock.demo_model(), max_model_len=2048)
frame = pd.DataFrame({"text": ["Penstock"]})
frame["answer"] = llm.map(frame, "What is {text}?", temperature=0)
print(frame["answer"][0])
"""


PROCESSOR = """
import pandas as pd, penstock
from penstock.data import build_processor, vLLMEngineProcessorConfig

def preprocess(row):
    return {"messages": [{"role": "user", "content": row["question"]}], "temperature": 0}

config = vLLMEngineProcessorConfig(model_source=penstock.demo_model(), engine_kwargs={"max_model_len": 2048})
answered = build_processor(config, preprocess)(pd.DataFrame({"question": ["What is Penstock?"]}))
print(answered["generated_text"][0])
"""


@pytest.mark.full
@pytest.mark.parametrize("script", [SCRIPT, PROCESSOR], ids=["LLM", "processor"])
def test_a_script_without_a_main_guard_prints_nothing_of_others_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.startswith("Penstock feeds LLM engines.")
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_run_answers_and_ends():
    command = [sys.executable, "-m", "penstock.cli", "run", penstock.demo_model()]
    done = subprocess.run(
        [*command, "What is", "Penstock?", "--max-model-len", "2048"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("Penstock feeds LLM engines.")
    assert done.stderr == ""


@pytest.mark.full
def test_a_table_is_a_job_that_a_second_call_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame({"text": ["Penstock", "prefix caching"], "n": [1, 2]}, index=[7, 3])
    given: Any = {"model": penstock.demo_model(), "params": {"temperature": 0}, **ENGINE}
    answered = penstock.batch(frame, "What is {text}?", name="job", **given)
    assert answered.columns.to_list() == ["text", "n", "answer", "error"]
    assert answered["answer"][7].startswith("Penstock feeds LLM engines.")
    with warnings.catch_warnings(action="error"):
        again = penstock.batch(frame, "What is {text}?", name="job", **given)
    pd.testing.assert_frame_equal(again, answered)
    described = penstock.batch(pl.DataFrame({"text": ["it"]}), "How is {text}?", schema=Told, **given)
    assert described.columns == ["text", "mood", "certain", "error"]
    assert described["mood"][0] in ("good", "bad")
