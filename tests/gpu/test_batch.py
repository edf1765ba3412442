"""`penstock batch` with an engine of its own, killed in the middle and started again: each row once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from tests.device import DEVICE, SHARE
from tests.http.batch_commands import journaled, lines
from tests.ray.command import Command

from recipes.adapters.answers import BASE_ANSWERS

pytestmark = [pytest.mark.full, pytest.mark.timeout(200 if DEVICE == "gpu" else 600)]

ROWS = 20_000 if DEVICE == "gpu" else 1_500
LIMIT_S = 120 if DEVICE == "gpu" else 240


def test_a_killed_batch_goes_on_and_answers_each_row_once(tmp_path: Path, record_property):
    asked, answered, model = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "model.yaml"))
    questions = [*BASE_ANSWERS]
    with asked.open("w") as file:
        for number in range(ROWS):
            messages = [{"role": "user", "content": questions[number % len(questions)]}]
            row = {"id": number, "messages": messages, "temperature": 0}
            file.write(json.dumps(row) + "\n")
    config = {
        "model_loading_config": {"model_id": "m", "model_source": "demo"},
        "accelerator_config": {"kind": DEVICE},
        "engine_kwargs": {"max_model_len": 1024, "kv_cache_memory_bytes": 1 << 28} | SHARE,
    }
    model.write_text(yaml.safe_dump(config))
    words = (str(asked), "-o", str(answered), "--model", str(model), "--reuse", "off")
    first = Command(*words, verb="batch")
    try:
        deadline = time.monotonic() + LIMIT_S
        while journaled(answered) < ROWS // 10:
            assert time.monotonic() < deadline, "\n".join(first.err)
            time.sleep(0.02)
        first.work().kill()
        assert first.exit_code() == 137
        assert first.left() == []
    finally:
        for process in first.living():
            process.kill()
    before = journaled(answered)
    assert before < ROWS
    second, began = Command(*words, verb="batch"), time.monotonic()
    try:
        assert second.exit_code() == 0, "\n".join(second.err)
    finally:
        for process in second.living():
            process.kill()
    record_property("rows_before_the_kill", before)
    record_property("second_run_s", round(time.monotonic() - began, 1))
    rows = lines(answered)
    assert [row["id"] for row in rows] == list(range(ROWS))
    wrong = [
        row["id"] for row in rows if BASE_ANSWERS[questions[row["id"] % len(questions)]] not in row.values()
    ]
    assert wrong == []
