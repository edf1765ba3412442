"""What an engine's process leaves behind when it fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from penstock.engines.vllm.core import failure_reason


class Limits(BaseModel):
    tokens: int


def test_an_error_is_told_on_one_line():
    assert failure_reason.describe(ValueError("too\n  long")) == "too long"


def test_an_error_that_says_little_is_told_with_its_type():
    assert failure_reason.describe(KeyError("x")) == "KeyError: 'x'"
    assert failure_reason.describe(MemoryError()) == "MemoryError"


def test_a_validators_error_is_told_without_its_dump():
    with pytest.raises(ValidationError) as failed:
        Limits.model_validate({"tokens": "secret"})
    assert "secret" not in failure_reason.describe(failed.value)
    assert "valid integer" in failure_reason.describe(failed.value)


def test_the_last_reason_stands(tmp_path: Path):
    file = tmp_path / "reason"
    failure_reason.write(file, ValueError("a first trouble"))
    failure_reason.write(file, ValueError("no weights here"))
    assert failure_reason.read(file) == "no weights here"


def test_a_pointer_to_another_process_does_not_hide_its_reason(tmp_path: Path):
    file = tmp_path / "reason"
    log = recorded(file)
    log.error("worker failed", exc_info=ValueError("no weights here"))
    log.error("worker failed", exc_info=RuntimeError("See root cause above."))
    failure_reason.write(file, RuntimeError("Initialization failed. See stack trace for root cause."))
    assert failure_reason.read(file) == "no weights here"


def test_a_logged_exception_is_left_for_the_owner_but_is_no_end(tmp_path: Path):
    file = tmp_path / "reason"
    log = recorded(file)
    log.error("without an exception")
    assert failure_reason.read(failure_reason.logged(file)) is None
    log.error("worker failed", exc_info=ValueError("no weights here"))
    assert failure_reason.read(failure_reason.logged(file)) == "no weights here"
    assert failure_reason.read(file) is None
    failure_reason.write(file, MemoryError())
    assert failure_reason.read(file) == "MemoryError"


def test_the_next_process_begins_without_reasons(tmp_path: Path):
    file = tmp_path / "reason"
    recorded(file).error("worker failed", exc_info=ValueError("no weights here"))
    failure_reason.write(file, MemoryError())
    failure_reason.clear(file)
    assert list(tmp_path.iterdir()) == []


def recorded(file: Path) -> logging.Logger:
    log = logging.Logger("vllm")
    log.addHandler(failure_reason.Recorder(file))
    return log
