"""What an engine's process leaves behind when it fails, and which defaults it was given."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

import penstock
from penstock.config import LLMConfig
from penstock.engines.vllm import environment, reason
from penstock.engines.vllm.defaults import Shape, engine_arguments


class Limits(BaseModel):
    tokens: int


def test_an_error_is_told_on_one_line():
    assert reason.describe(ValueError("too\n  long")) == "too long"


def test_an_error_that_says_little_is_told_with_its_type():
    assert reason.describe(KeyError("x")) == "KeyError: 'x'"
    assert reason.describe(MemoryError()) == "MemoryError"


def test_a_validators_error_is_told_without_its_dump():
    with pytest.raises(ValidationError) as failed:
        Limits.model_validate({"tokens": "secret"})
    assert "secret" not in reason.describe(failed.value)
    assert "valid integer" in reason.describe(failed.value)


def test_the_last_reason_stands(tmp_path: Path):
    file = tmp_path / "reason"
    reason.write(file, ValueError("a first trouble"))
    reason.write(file, ValueError("no weights here"))
    assert reason.read(file) == "no weights here"


def test_a_pointer_to_another_process_does_not_hide_its_reason(tmp_path: Path):
    file = tmp_path / "reason"
    reason.write(file, ValueError("no weights here"))
    reason.write(file, RuntimeError("Initialization failed. See stack trace for root cause."))
    assert reason.read(file) == "no weights here"


def test_a_logged_exception_is_left_for_the_owner(tmp_path: Path):
    file = tmp_path / "reason"
    log = logging.Logger("vllm")
    log.addHandler(reason.Recorder(file))
    log.error("without an exception")
    assert reason.read(file) is None
    log.error("worker failed", exc_info=ValueError("no weights here"))
    assert reason.read(file) == "no weights here"


def shape(source: str, **engine_kwargs: object) -> Shape:
    return Shape.of(
        LLMConfig(
            model_loading_config={"model_id": "m", "model_source": source},
            accelerator_config={"kind": "cpu"},
            engine_kwargs=engine_kwargs,
        )
    )


def test_the_embedded_model_is_tiny_and_a_hub_id_is_not():
    assert shape(penstock.demo_model()) == Shape(cpu=True, tiny=True, workers=1)
    assert shape("org/model", tensor_parallel_size=2) == Shape(cpu=True, tiny=False, workers=2)


def test_one_worker_runs_in_the_core_and_many_beside_it():
    executors = [engine_arguments(Shape(False, False, n))["distributed_executor_backend"] for n in (1, 2)]
    assert executors == ["uni", "mp"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.environ", {"OMP_NUM_THREADS": "8", "VLLM_PLUGINS": "theirs"})
    environment.prepare(Shape(cpu=True, tiny=True, workers=2))
    assert os.environ["OMP_NUM_THREADS"] == "8"
    assert os.environ["VLLM_PLUGINS"] == "theirs,penstock"
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
