"""The words of `penstock batch`, up to where an engine would be needed."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.cli.batch import submit
from penstock.cli.batch.terminal import Pace, shown, table_of
from penstock.data.job.protocol import RowCompleted
from penstock.data.job.report import ErrorKind, JobReport, RunStats
from penstock.errors import ConfigError

pytestmark = pytest.mark.parity("X19")


def said(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["batch", *map(str, words)])
    return result.exit_code, result.output


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    return path


def test_an_input_needs_no_word_before_it(rows: Path):
    code, text = said(rows, "-o", rows.with_name("out.jsonl"))
    assert (code, text.startswith("penstock batch: Name the engines: --model")) == (2, True)


def test_a_dry_run_shows_prompts_and_starts_nothing(rows: Path):
    words = ("--engine", "sim", "--prompt", "Say: {text}", "--dry-run")
    code, text = said(rows, "-o", rows.with_name("out.jsonl"), *words)
    assert code == 0
    assert '"content":"Say: one"' in text
    assert "2 of 2 rows can become requests." in text
    assert [path.name for path in rows.parent.iterdir()] == ["in.jsonl"]


def test_a_dry_run_renders_the_models_own_template(rows: Path):
    words = ("--model", "demo", "--prompt", "Say: {text}", "--dry-run")
    code, text = said(rows, "-o", rows.with_name("out.jsonl"), *words)
    assert code == 0, text
    assert "Say: one" in text
    assert '"content"' not in text


def test_a_prompt_of_a_row_is_a_chat_message_without_no_chat(tmp_path: Path):
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "one"}\n')
    words = (rows, "-o", tmp_path / "out.jsonl", "--engine", "sim", "--dry-run")
    assert '"messages":[{"role":"user","content":"one"}]' in said(*words)[1]
    assert "\nRow 0:\none\n" in said(*words, "--no-chat")[1]


def test_a_dry_run_names_the_rows_that_cannot_be_asked(rows: Path):
    words = ("--engine", "sim", "--prompt", "Say: {txt}", "--dry-run")
    code, text = said(rows, "-o", rows.with_name("out.jsonl"), *words)
    assert code == 1
    assert "Row 0: The prompt names the column 'txt'; the row has text." in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--url", "http://x", "--app", "y"), "Give --url or --app, not both."),
        (("--url", "http://x", "--max-model-len", "9"), "--max-model-len is not an option"),
        (("--engine", "sim", "--task", "sing"), "'sing' is not one of 'generate'"),
        (("--engine", "sim", "--param", "cold"), "--param 'cold' must be NAME=VALUE"),
        (("--engine", "sim", "--prompt", "x", "--dry-run"), "must name a column in braces"),
    ],
)
def test_words_that_do_not_go_together_are_told(rows: Path, words: tuple[str, ...], sentence: str):
    code, text = said(rows, "-o", rows.with_name("out.jsonl"), *words)
    assert code == 2
    assert sentence in text


def test_an_output_without_a_job_has_no_status(rows: Path):
    code, text = said("status", rows)
    assert (code, "has no journal beside it" in text) == (2, True)


def test_help_says_how_to_go_on():
    code, text = said("--help")
    assert code == 0
    assert "penstock batch resume" in text


def test_time_left_follows_from_the_last_seconds():
    pace, stats = Pace(), RunStats(total=100)
    pace.note(0.0, stats)
    for row in range(20):
        stats.add(RowCompleted(row, "ok", output_tokens=5))
    stats.add(RowCompleted(20, "failed", "poison_row"))
    pace.note(2.1, stats)
    told = "21 of 100 rows · 10.0 rows/s · 48 tok/s · 0:07 left · failed: 1 poison_row"
    assert pace.text(stats) == told


def test_a_report_says_what_to_do_next():
    unfinished = JobReport(output="o.jsonl", ended="SIGINT", rows=9, ok=3, waiting=6)
    assert shown(unfinished)[-1] == "Resume:    penstock batch resume o.jsonl"
    kinds = [ErrorKind("poison_row", 1, 4, "It died.")]
    failed = JobReport(output="o.jsonl", ended="finished", rows=9, ok=8, failed=1, error_kinds=kinds)
    assert "           1 x poison_row: It died." in shown(failed)
    assert shown(failed)[-1] == "Try again: penstock batch resume o.jsonl --retry-failed"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_rows_of_a_trial_are_a_table_of_the_users_columns_and_the_answer(tmp_path: Path, form: str):
    file = tmp_path / f"out.{form}"
    row = {"id": "", "text": "a\nb " * 50, "generated_text": "", "attempts": "1"}
    rows = [row | {"id": str(n), "generated_text": f"[b]{n}"} for n in range(30)]
    if form == "csv":
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown_rows = io.StringIO()
    Console(file=shown_rows, width=60).print(*table_of(str(file)), sep="\n", markup=False)
    head, _, *lines, more = [line for line in shown_rows.getvalue().splitlines() if line.strip()]
    assert head.split() == ["id", "text", "generated_text"]
    assert [line.split()[0] for line in lines] == [str(n) for n in range(20)]
    assert lines[3].split()[1:3] == ["a", "b"]
    assert (lines[3].rstrip().endswith("[b]3"), "…" in lines[3], more) == (True, True, "And 10 more rows.")


def test_a_file_that_changes_while_it_is_sent_is_another_batchs(tmp_path: Path):
    source, note = tmp_path / "in.jsonl", tmp_path / "out.jsonl.batch.json"
    source.write_text('{"url": "/v1/completions"}\n')

    class Files:
        def create(self, file: io.BufferedReader, purpose: str) -> SimpleNamespace:
            file.read()
            source.write_text('{"url": "/v1/completions", "custom_id": "new"}\n')
            return SimpleNamespace(id="file-1")

    submit._uploaded(cast(Any, SimpleNamespace(files=Files())), source, note, "http://x", "24h")
    with pytest.raises(ConfigError, match="is of another batch"):
        submit._known(source, tmp_path / "out.jsonl", note, "http://x", None)
