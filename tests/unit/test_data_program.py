"""Programs per row, on the simulator: calls, their sum, and what becomes of a row whose program fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from penstock.asgi_client import call
from penstock.config import LLMConfig
from penstock.data.backends.protocol import Response
from penstock.data.execution.retry import classify_response
from penstock.data.execution.window import Window
from penstock.data.pipeline.model_configs import SGLangEngineProcessorConfig
from penstock.data.pipeline.row_program import ProgramLLM, program_columns, program_schema, run_program
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.data.results.outcome import Failure, Outcome
from penstock.data.rows.request import RowRequest, Task
from penstock.engines import engine_class
from penstock.errors import BadRequest, Error, NotFound, Overloaded, PromptTooLong, Unavailable

pytestmark = pytest.mark.parity("X20")

SIM = LLMConfig(
    model_loading_config={"model_id": "sim"},
    llm_engine="sim",
    engine_kwargs={"step_base_ms": 0.1, "max_model_len": 512, "enable_prompt_tokens_details": True},
)


class Asked:
    """Asks the simulator; keeps what was asked, and how many at a time."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.bodies: list[dict[str, Any]] = []
        self.at_a_time = self.most = 0

    async def __call__(self, request: RowRequest) -> Outcome:
        self.bodies.append(json.loads(request.body))
        self.at_a_time += 1
        self.most = max(self.most, self.at_a_time)
        answer = await call(self._app, request.path, request.body)
        self.at_a_time -= 1
        return classify_response(Response(answer.status, await answer.read()), attempts=1)


@pytest.fixture
async def ask() -> AsyncIterator[Asked]:
    engine = engine_class(SIM)(SIM)
    await engine.start()
    yield Asked(engine.app())
    await engine.stop()


async def refined(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
    messages = [{"role": "user", "content": row["question"]}]
    first = await llm.chat(messages, max_tokens=5, ignore_eos=True)
    messages += [first.message, {"role": "user", "content": "Shorter."}]
    second = await llm.chat(messages, max_tokens=3, ignore_eos=True)
    return {"answer": second.text, "tokens": first.generated_tokens, "reason": second.finish_reason}


async def test_a_second_turn_holds_the_first(ask: Asked):
    outcome = await run_program(refined, {"question": "What?"}, ask)
    output, columns = program_columns(outcome)
    first, second = ask.bodies
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert (output["tokens"], output["reason"]) == (5, "length")
    assert (columns["calls"], columns["num_generated_tokens"], columns["error"]) == (2, 8, None)
    assert columns["num_input_tokens"] > columns["num_cached_tokens"]


async def test_calls_run_side_by_side(ask: Asked):
    async def votes(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        replies = await asyncio.gather(
            *(llm.chat("Yes?", seed=i, max_tokens=4, ignore_eos=True) for i in range(5))
        )
        return {"votes": [reply.text for reply in replies]}

    output, columns = program_columns(await run_program(votes, {}, ask))
    assert len(output["votes"]) == ask.most == columns["calls"] == 5
    assert columns["num_generated_tokens"] == 20


async def test_every_kind_of_call_has_its_answer(ask: Asked):
    async def all_kinds(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        completed = await llm.complete("a text", max_tokens=2, n=2)
        vector = await llm.embed("a text")
        scores = await llm.score("a text", ["a text", "another"])
        return {"texts": completed.texts, "size": len(vector), "scores": scores}

    output, columns = program_columns(await run_program(all_kinds, {}, ask))
    assert len(output["texts"]) == 2
    assert output["size"] > 1
    assert output["scores"][0] > output["scores"][1]
    assert columns["calls"] == 3


async def test_defaults_hold_for_every_call(ask: Asked):
    await run_program(refined, {"question": "What?"}, ask, Task(), {"sampling_params": {"temperature": 0.5}})
    assert [body["temperature"] for body in ask.bodies] == [0.5, 0.5]


async def test_calls_have_what_the_config_says_of_all_rows(ask: Asked):
    stage = {"chat_template_kwargs": {"enable_thinking": False}}
    spec = stage_spec(SGLangEngineProcessorConfig(model_source="m", chat_template_stage=stage), refined)
    await spec.run_row(cast("Window", SimpleNamespace(run=ask)), {"question": "What?"})
    assert [body["chat_template_kwargs"] for body in ask.bodies] == [{"enable_thinking": False}] * 2


async def test_a_program_can_catch_what_an_engine_refuses(ask: Asked):
    async def careful(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        try:
            await llm.chat("long " * 1000)
        except PromptTooLong as error:
            return {"said": str(error), "short": (await llm.chat("Short.", max_tokens=1)).text}
        return {}

    output, columns = program_columns(await run_program(careful, {}, ask))
    assert "512" in output["said"]
    assert output["short"]
    assert columns["calls"] == 2


async def failed(program: Any, ask: Any) -> Failure:
    outcome = await run_program(program, {}, ask)
    assert (outcome.state, bytes(outcome.body)) == ("failed", b"")
    assert outcome.failure is not None
    return outcome.failure


async def test_what_a_program_lets_pass_is_the_rows_failure(ask: Asked):
    async def careless(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        return {"text": (await llm.chat("long " * 1000)).text}

    failure = await failed(careless, ask)
    assert (failure.code, failure.stage, failure.status) == ("context_length_exceeded", "engine", 400)


async def test_a_call_that_cannot_be_asked_is_told_in_the_program(ask: Asked):
    async def wrong(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
        return {"text": (await llm.chat("x", temprature=1)).text}

    failure = await failed(wrong, ask)
    assert failure.message == "temprature is not known: did you mean temperature?"
    assert ask.bodies == []


async def nothing(row: dict[str, Any], llm: ProgramLLM) -> None:
    return None


async def breaks(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
    return {"x": row["missing"]}


async def no_json(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
    return {"x": object()}


def at_once(row: dict[str, Any], llm: ProgramLLM) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (nothing, "The program returned None; it must return a dict, the row's output."),
        (breaks, "The program raised KeyError: 'missing'"),
        (no_json, "output.x is an object, which JSON cannot hold"),
        (at_once, "The program returned a dict at once; write `async def program(row, llm)`."),
    ],
)
async def test_a_program_at_fault_fails_its_row(program: Any, said: str, ask: Asked):
    failure = await failed(program, ask)
    assert said in failure.message
    assert (failure.code, failure.stage) == ("own_code_failed", "postprocess")


async def test_all_rows_of_programs_fit_one_schema(ask: Asked):
    outcomes = [await run_program(refined, {"question": "What?"}, ask), await run_program(breaks, {}, ask)]
    rows = [program_columns(outcome)[1] for outcome in outcomes]
    assert pa.Table.from_pylist(rows, schema=program_schema()).to_pylist() == rows


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("context_length_exceeded", 400, PromptTooLong),
        ("overloaded", 429, Overloaded),
        ("rate_limited", 429, Overloaded),
        ("no_such_thing", 404, NotFound),
        ("BadRequestError", 422, BadRequest),
        ("poison", None, Error),
        ("engine_dead", 503, Unavailable),
    ],
)
def test_a_failure_is_the_error_that_it_was_and_back(code: str, status: int | None, kind: type[Error]):
    failure = Failure(code=code, message="Why.", stage="engine", attempts=3, status=status)
    error = failure.to_error()
    assert isinstance(error, kind)
    again = Failure.from_error(error, "engine")
    assert (again.code, again.message, again.attempts) == (code, "Why.", 3)
