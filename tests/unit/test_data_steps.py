"""The steps around a pipeline's engines, on single batches: what goes in, and what is read out of it."""

import json
import pickle
from dataclasses import replace

import pyarrow as pa
import pytest

from penstock.config import LLMConfig
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import RetryPolicy
from penstock.data.pipeline.batch_columns import FIELDS, OUTCOME, ROW, pack, unpack
from penstock.data.pipeline.configs import EngineProcessorConfig
from penstock.data.pipeline.engine_stage import EngineStage
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.data.pipeline.user_steps import Postprocess, Preprocess
from penstock.data.results.outcome import Failure, Outcome
from penstock.errors import ConfigError

SEEN = []


def _seen():
    SEEN.append(1)


class Loud:
    """Says so when it is unpickled."""

    def __reduce__(self):
        return _seen, ()


@pytest.fixture
def loud():
    yield Loud
    assert SEEN == []


def request(fields, row):
    return {**fields}


@pytest.mark.parametrize("name", [ROW, FIELDS, OUTCOME, "__penstock_anything"])
def test_a_dataset_with_a_column_of_ours_is_refused_and_never_unpickled(name, loud):
    batch = pa.table({"text": ["a"], name: [pickle.dumps(loud())]})
    with pytest.raises(ConfigError, match=name):
        Preprocess(None, request)(batch)


def test_a_postprocess_step_unpickles_no_row_of_the_users(loud):
    batch = pa.table({"text": ["a"], ROW: [pickle.dumps(loud())]})
    batch = batch.append_column(FIELDS, pack([{}])).append_column(OUTCOME, pack([Outcome(state="ok")]))
    step = Postprocess(
        None, lambda outcome, fields: {"error": None}, lambda fields: set(), continue_on_error=True
    )
    assert list(step(batch)["text"]) == ["a"]


def test_rows_of_a_plain_list_travel_packed():
    asked = Preprocess(None, request, is_packed=True)(pa.table({ROW: [pickle.dumps({"text": "a"})]}))
    assert [pickle.loads(row) for row in asked.column(FIELDS).to_pylist()] == [{"text": "a"}]


def test_rows_that_fail_alike_are_logged_once(caplog):
    def bad(row):
        raise ZeroDivisionError(row["n"])

    batch = pa.Table.from_pylist([{"n": n} for n in range(5)])
    for _ in range(2):  # each task has a step of its own
        ends = unpack(Preprocess(bad, request)(batch), OUTCOME)
    assert [end.failure.message for end in ends] == [f"ZeroDivisionError: {n}" for n in range(5)]
    assert caplog.text.count("ZeroDivisionError") == 1


def test_an_engines_failure_that_preprocessing_raises_again_stays_what_it_was():
    failure = Failure(code="odd", message="No.", stage="preprocess", attempts=3, status=418)

    def bad(row):
        raise failure.to_error()

    (end,) = unpack(Preprocess(bad, request)(pa.table({"n": [1]})), OUTCOME)
    assert (end.failure, end.attempts) == (failure, 3)


def test_postprocessing_loses_no_column_to_the_name_of_an_error():
    batch = pa.table({"n": [1]}).append_column(FIELDS, pack([{}]))
    batch = batch.append_column(OUTCOME, pack([Outcome(state="ok")]))
    step = Postprocess(
        lambda row: {"error": "mine", "original_error": "older"},
        lambda outcome, fields: {"error": None},
        lambda fields: set(),
        continue_on_error=True,
    )
    found = {name: list(values) for name, values in step(batch).items()}
    assert found == {"original_error": ["mine"], "original_original_error": ["older"], "error": [None]}


def sim(**options):
    speed = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": float("inf")}
    kwargs = {"max_model_len": 512, "kv_tokens": 65536, **speed, **options}
    return LLMConfig(model_loading_config={"model_id": "sim"}, llm_engine="sim", engine_kwargs=kwargs)


def outcomes(config, journal, rows, program=None):
    """Of rows, through an engine of their own with a journal."""
    found = stage_spec(EngineProcessorConfig(llm_config=config), program)
    stage = EngineStage(found, RetryPolicy(), str(journal))
    return unpack(stage(Preprocess(None, found.build_request)(pa.Table.from_pylist(rows))), OUTCOME)


def texts(ends):
    return [json.loads(bytes(end.body))["choices"][0]["text"] for end in ends]


GREEDY = {"max_tokens": 9, "temperature": 0.0}
DRAWN = {"max_tokens": 9, "temperature": 1.0}


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_a_journal_answers_the_same_row_for_the_same_model_only(tmp_path, params):
    rows = [{"prompt": f"row {n}", **params} for n in range(3)]
    first = outcomes(sim(), tmp_path, rows)
    again = outcomes(sim(max_num_seqs=2), tmp_path, rows)
    assert [end.took_s for end in again] == [end.took_s for end in first]  # the very same ones
    assert texts(outcomes(sim(reply="another model"), tmp_path, rows)) == ["another model"] * 3


def test_a_journal_gives_an_answer_that_was_drawn_to_one_row_only(tmp_path):
    rows = [{"prompt": "row", "n_th": n // 2, **DRAWN} for n in range(6)]
    first, again = outcomes(sim(), tmp_path, rows), outcomes(sim(), tmp_path, rows)
    assert sorted(end.took_s for end in again) == sorted(end.took_s for end in first)


def test_a_journal_gives_an_answer_that_is_always_the_same_to_all(tmp_path):
    row = {"prompt": "row", **GREEDY}
    (first,) = outcomes(sim(), tmp_path, [row])
    again = outcomes(sim(), tmp_path, [row, {**row, "n_th": 1}])
    assert {end.took_s for end in again} == {first.took_s}


class Odd:
    """Answers what is no completion."""

    async def start(self, progress=None): ...

    async def stop(self): ...

    async def send(self, request):
        return Response(200, b'{"detail": "Welcome."}')

    def available_slots(self, in_flight):
        return 8


def test_what_is_no_answer_of_its_endpoint_fails_its_row_and_is_not_stored(tmp_path):
    rows = [{"prompt": "row", **GREEDY}]
    odd = replace(stage_spec(EngineProcessorConfig(llm_config=sim())), make_backend=Odd)
    stage = EngineStage(odd, RetryPolicy(), str(tmp_path))
    (end,) = unpack(stage(Preprocess(None, odd.build_request)(pa.Table.from_pylist(rows))), OUTCOME)
    assert (end.state, end.failure.code) == ("failed", "bad_answer")
    assert len(texts(outcomes(sim(), tmp_path, rows))) == 1


def test_a_journal_answers_the_same_program_only(tmp_path):
    async def one(row, llm):
        return {"said": "one"}

    async def other(row, llm):
        return {"said": "other"}

    said = []
    for program in (one, other, one):
        (end,) = outcomes(sim(), tmp_path, [{"item": 1}], program)
        said.append(json.loads(bytes(end.body))["output"]["said"])
    assert said == ["one", "other", "one"]


@pytest.mark.parametrize(
    "other",
    [
        {"model_loading_config": {"model_id": "m", "model_source": "another"}},
        {"engine_kwargs": {"quantization": "fp8"}},
        {"engine_kwargs": {"chat_template": "x"}},
        {"lora_config": {"dynamic_lora_loading_path": "/adapters"}},
        {"preprocessor": "my:Preprocessor"},
    ],
)
def test_what_answers_depend_on_is_in_a_models_identity(other):
    mine = {"model_loading_config": {"model_id": "m"}}
    assert identity(**mine | other) != identity(**mine)
    assert identity(**mine, engine_kwargs={"gpu_memory_utilization": 0.5}) == identity(**mine)


def identity(**values):
    return stage_spec(EngineProcessorConfig(llm_config=LLMConfig(**values))).identity


def test_a_failed_row_has_no_empty_columns_of_the_answer_beside_what_postprocess_returns():
    config = EngineProcessorConfig(
        llm_config=LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    )
    of = stage_spec(config)
    row = {"text": "a", "generated_text": "the user's own"}
    end = Outcome(state="failed", failure=Failure(code="bad", message="Why.", stage="engine", attempts=1))
    batch = pa.Table.from_pylist([row])
    batch = batch.append_column(FIELDS, pack([{"prompt": "a"}])).append_column(OUTCOME, pack([end]))
    (whole, short) = (
        Postprocess(function, of.columns, of.request_fields, continue_on_error=True)(batch)
        for function in (None, lambda row: {"answer": row["text"]})
    )
    assert {"generated_text", "attempts", "original_generated_text"} <= whole.keys()
    assert sorted(short) == ["error", "original_generated_text", "text"]
    assert short["error"][0]["code"] == "bad"


@pytest.mark.parametrize("function", [None, lambda row: {"answer": row["text"]}])
def test_failures_have_rays_name_where_the_program_says_to_go_on(function):
    config = EngineProcessorConfig(llm_config=sim(), should_continue_on_error=True)
    assert config.names_failures
    assert not EngineProcessorConfig(llm_config=sim()).names_failures
    why = Failure(code="bad", message="Why.", stage="engine", attempts=1)
    batch = pa.table({"text": ["a", "b"]}).append_column(FIELDS, pack([{}, {}]))
    ends = [Outcome(state="failed", failure=why), Outcome(state="skipped")]
    batch = batch.append_column(OUTCOME, pack(ends))
    of = stage_spec(config)
    step = Postprocess(function, of.columns, of.request_fields, True, names_failures=config.names_failures)
    assert list(step(batch)["__inference_error__"]) == ["Why.", ""]
