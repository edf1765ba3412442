"""Every end of `penstock batch` other than success says what was wrong, where, and what to do: on stderr."""

import gzip
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli.app import app
from penstock.cli.batch import run as job
from penstock.data.storage.paths import storage_path

pytestmark = pytest.mark.parity("X19")

NOWHERE = ("--url", "http://127.0.0.1:9")
ROWS = '{"prompt": "one"}\n{"prompt": "two"}\n'


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """`penstock batch` in a process of its own, forked from this one so that nothing is imported anew."""

    def run(*words: object) -> tuple[int, str, str]:
        outputs = [tmp_path / "stdout", tmp_path / "stderr"]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for number, path in enumerate(outputs, 1):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
                app(["batch", *map(str, words)])
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, *(path.read_text() for path in outputs)

    return run


def put(path: Path, data: str | bytes) -> None:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())


PACKED = gzip.compress(ROWS.encode() * 1000)


@pytest.mark.parametrize(
    ("name", "data", "options", "code", "told"),
    [
        ("a.csv", "a,b\n1,é\n".encode("utf-16"), (), 1, "a.csv' cannot be read: it is not UTF-8"),
        ("a.csv", "a,a\n1,2\n", (), 2, "a.csv' has two columns named 'a'"),
        ("a.csv", "a;b\n1;2\n", ("--prompt", "{a}"), 2, "separated by commas"),
        ("a.parquet", b"PAR1" + b"x" * 99, (), 1, "a.parquet' cannot be read"),
        (
            "a.jsonl.gz",
            ROWS,
            (),
            1,
            "a.jsonl.gz' cannot be read: zlib inflate failed: incorrect header check",
        ),
        ("a.jsonl.gz", PACKED[:-12], (), 1, "Truncated compressed stream"),
        ("a.jsonl", '[{"prompt": "x"}]\n[]\n', (), 1, "The line must be a JSON object, but is a list"),
        ("a.jsonl", '{"prompt": 1}\n' * 3, (), 1, "3 of 3 rows failed"),
        ("a.jsonl", '{"question": "x"}\n' * 3, (), 2, "--prompt makes one of columns"),
        ("a.jsonl", ROWS, ("--param", "temprature=0"), 2, "did you mean temperature?"),
        ("a.jsonl", '{"question": "x"}\n', ("--prompt", "{questoin}"), 2, "Did you mean 'question'?"),
        ("a.jsonl", ROWS, ("--param", "stop=[1"), 2, "--param stop:1:3: is not valid YAML"),
        ("a.jsonl", ROWS, ("--param", "day=!!int x"), 2, "--param day: is not valid YAML: invalid literal"),
        ("a.jsonl", ROWS, ("--param", "temperature=.nan"), 2, "--param temperature is nan"),
        ("a.jsonl", ROWS, (), 1, "http://127.0.0.1:9 cannot be reached"),
        ("a.jsonl", ROWS, ("--report", "/nowhere/report.json"), 2, "'/nowhere'"),
        ("a.jsonl", ROWS, ("--replicas", "2"), 2, "--replicas has no effect with --url"),
        ("a.jsonl", ROWS, ("--deployment", "x"), 2, "--deployment has no effect with --url"),
        ("a.jsonl", ROWS, ("--system", "x"), 2, "--system has no effect without --prompt"),
        ("a.jsonl", ROWS, ("--reuse", "off", "--reuse-from", "x"), 2, "--reuse-from has no effect"),
        ("a.jsonl", "", ("--limit", "0"), 2, "Invalid value for '--limit'"),
    ],
)
def test_bad_input_is_told_in_words(tmp_path: Path, command, name: str, data, options, code: int, told: str):
    put(tmp_path / name, data)
    found, _, err = command(tmp_path / name, "-o", tmp_path / "out.jsonl", *NOWHERE, *options)
    assert (found, told in err, "Traceback" in err) == (code, True, False), err


@pytest.mark.parametrize(
    ("output", "told"),
    [
        ("out.txt", "out.txt' must end with .jsonl"),
        ("in.jsonl", "would be both input and output"),
        ("other.jsonl", "other.jsonl' exists"),
        ("in.jsonl/out.jsonl", "Not a directory"),
        ("/proc/nowhere/out.jsonl", "No such file or directory"),
        ("broken.jsonl", "broken.jsonl.journal/job.json' is not a job that this version can read"),
        ("x" * 250 + ".jsonl", "File name too long"),
    ],
)
def test_an_output_that_cannot_be_written_is_told_in_words(tmp_path: Path, command, output: str, told: str):
    put(tmp_path / "in.jsonl", ROWS)
    put(tmp_path / "other.jsonl", "precious")
    (tmp_path / "broken.jsonl.journal").mkdir()
    put(tmp_path / "broken.jsonl.journal/job.json", "{")
    code, _, err = command(tmp_path / "in.jsonl", "-o", tmp_path / output, *NOWHERE)
    assert (code != 0, told in err, "Traceback" in err) == (True, True, False), err


def test_inputs_that_are_not_there_are_told(tmp_path: Path, command):
    for missing in ("nothing.jsonl", "*.jsonl"):
        code, _, err = command(tmp_path / missing, "-o", tmp_path / "out.jsonl", *NOWHERE)
        assert (code, "There is no file at" in err) == (2, True)


def test_a_damaged_journal_is_told(tmp_path: Path, command):
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE)
    put(tmp_path / "in.jsonl", ROWS)
    assert command(*words)[0] == 1
    put(tmp_path / "out.jsonl.journal/0001-engine-1.jsonl", "{}x\n{}\n")
    for what in (words, ("status", tmp_path / "out.jsonl")):
        code, _, err = command(*what)
        assert (code, "is damaged in line 1" in err, "Traceback" in err) == (1, True, False)


@pytest.mark.parametrize("what", [(), ("--dry-run",)])
def test_a_fault_of_our_own_says_so(tmp_path: Path, command, monkeypatch, what):
    def broken(*args: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr("penstock.data.job.job.InputFiles.rows", broken)
    put(tmp_path / "in.jsonl", ROWS)
    code, _, err = command(tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE, *what)
    assert (code, "a fault of Penstock's own: RuntimeError: odd" in err, "Traceback" in err) == (
        1,
        True,
        False,
    )
    if not what:
        log = Path(err.rpartition("Full log: ")[2].strip().rstrip("."))
        assert "RuntimeError: odd" in log.read_text()


def test_a_process_that_was_killed_is_told(tmp_path: Path, command, monkeypatch):
    monkeypatch.setattr(job, "_run", lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    put(tmp_path / "in.jsonl", ROWS)
    code, _, err = command(tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE)
    assert (code, "was killed by SIGKILL" in err, "the same command" in err) == (137, True, True)


def test_a_limit_that_stopped_it_is_told(tmp_path: Path, command):
    put(tmp_path / "in.jsonl", ROWS)
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE)
    code, _, err = command(*words, "--max-seconds", "0")
    assert code == 3
    assert f"2 rows are left. Resume: penstock batch resume {tmp_path / 'out.jsonl'}" in err


def test_a_finished_job_that_is_asked_for_again_is_a_success(tmp_path: Path, command):
    """As a scheduler does that did not see it end; but never for another input."""
    put(tmp_path / "in.jsonl", '{"text": ""}\n' * 3)
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE, "--prompt", "{text}")
    assert command(*words)[0] == 0
    before = os.stat(tmp_path / "out.jsonl")
    for again in (words, ("resume", tmp_path / "out.jsonl")):
        code, out, err = command(*again, "--report", tmp_path / "report.json")
        assert (code, "is finished; nothing was run" in err, "3 skipped" in out) == (0, True, True)
        assert json.loads((tmp_path / "report.json").read_text())["skipped"] == 3
    assert os.stat(tmp_path / "out.jsonl") == before
    (tmp_path / "out.jsonl").unlink()
    assert (command(*words)[0], (tmp_path / "out.jsonl").exists()) == (0, True)
    put(tmp_path / "in.jsonl", '{"text": " "}\n')
    code, _, err = command(*words)
    assert (code, "has changed" in err) == (2, True)


def test_a_limit_of_rows_can_be_raised_and_not_lowered(tmp_path: Path, command):
    put(tmp_path / "in.jsonl", '{"text": ""}\n' * 10)
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE, "--prompt", "{text}")
    for limit, rows in (("3", 3), ("7", 7), (None, 10)):
        code, out, err = command(*words, *(("--limit", limit) if limit else ()))
        assert (code, f"{rows} skipped" in out) == (0, True), err
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == rows
    code, _, err = command(*words, "--limit", "5")
    assert (code, "can be raised, not lowered" in err) == (2, True)


def test_another_model_does_not_go_on_by_itself(tmp_path: Path, command):
    put(tmp_path / "in.jsonl", '{"text": ""}\n')
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "--prompt", "{text}")
    assert command(*words, *NOWHERE, "--model", "a")[0] == 0
    code, _, err = command(*words, *NOWHERE, "--model", "b")
    assert (code, "resume" in err, "answers of both" in err) == (2, True, True)
    assert command(*words, "--url", "http://127.0.0.1:10", "--model", "a")[0] == 0


def test_the_kinds_of_failures_come_with_an_example(tmp_path: Path, command):
    put(tmp_path / "in.jsonl", '{"text": ""}\n{"txt": "x"}\n')
    words = (tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", *NOWHERE, "--prompt", "{text}")
    code, out, err = command(*words)
    assert (code, "1 x invalid_request: The prompt names the column 'text'" in out) == (1, True), err
    assert "--retry-failed" not in out


def test_no_key_goes_to_a_url_that_somebody_else_wrote(tmp_path: Path, command, monkeypatch):
    put(tmp_path / "in.jsonl", '{"text": ""}\n')
    out = tmp_path / "out.jsonl"
    words = (tmp_path / "in.jsonl", "-o", out, "--prompt", "{text}", *NOWHERE, "--model", "a")
    assert command(*words)[0] == 0
    assert command("resume", out, "--api-key", "k")[0] == 0
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(out).st_uid + 1)
    assert command("resume", out)[0] == 0
    code, _, err = command("resume", out, "--api-key", "k")
    assert (code, "add --url http://127.0.0.1:9; else drop --api-key." in err) == (2, True), err
    assert command("resume", out, "--api-key", "k", *NOWHERE)[0] == 0
    monkeypatch.setenv("VLLM_API_KEY", "v")
    code, _, err = command("resume", out)
    assert (code, "else unset VLLM_API_KEY." in err) == (2, True), err


@pytest.mark.parametrize(
    ("beside", "options"), [({"app": "a"}, ("--deployment", "d")), ({"words": ["m"]}, ("--replicas", "2"))]
)
def test_no_option_but_the_url_itself_sends_a_key_there(tmp_path, command, monkeypatch, beside, options):
    """A forged journal may name an application or a model beside its URL, which is the one that is used."""
    put(tmp_path / "in.jsonl", '{"text": ""}\n')
    out = tmp_path / "out.jsonl"
    assert command(tmp_path / "in.jsonl", "-o", out, "--prompt", "{text}", *NOWHERE)[0] == 0
    path = tmp_path / "out.jsonl.journal" / "job.json"
    manifest = json.loads(path.read_text())
    manifest["order"]["engines"] |= beside
    path.write_text(json.dumps(manifest))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(out).st_uid + 1)
    code, _, err = command("resume", out, "--api-key", "k", *options)
    assert (code, "add --url http://127.0.0.1:9;" in err) == (2, True), err


def test_a_journal_of_others_is_not_the_users_by_the_output_that_it_names(tmp_path: Path, command):
    put(tmp_path / "in.jsonl", '{"text": ""}\n')
    out = tmp_path / "out.jsonl"
    assert command(tmp_path / "in.jsonl", "-o", out, "--prompt", "{text}", *NOWHERE)[0] == 0
    stored = (tmp_path / "out.jsonl.journal" / "job.json").read_bytes()
    storage_path("memory://theirs/out.jsonl.journal/job.json").write(stored)
    assert command("resume", out, "--api-key", "k")[0] == 0
    code, _, err = command("resume", "memory://theirs/out.jsonl", "--api-key", "k")
    assert (code, "add --url http://127.0.0.1:9;" in err) == (2, True), err


SIM = "model_loading_config: {model_id: s, model_source: demo}\nllm_engine: sim\nengine_kwargs: {reply: %s}\n"


def test_a_config_that_changed_does_not_go_on_by_itself(tmp_path: Path, command):
    """Nor by `resume`, unless that names the engines."""
    config, out = tmp_path / "c.yaml", tmp_path / "out.jsonl"
    put(tmp_path / "in.jsonl", '{"text": ""}\n' * 2)
    put(config, SIM % "OLD")
    words = (tmp_path / "in.jsonl", "-o", out, "--prompt", "{text}", "--model", config)
    assert command(*words)[0] == 0
    put(config, SIM % "NEW")
    for what in (words, ("resume", out), ("resume", out, "--replicas", "2")):
        code, _, err = command(*what)
        assert (code, "engine_kwargs.reply was 'OLD', and is 'NEW'" in err) == (2, True), err
        assert f"penstock batch resume {out} --model MODEL" in err
    assert command("resume", out, "--model", config)[0] == 0


def test_a_model_alone_keeps_the_service_that_the_job_began_with(
    tmp_path: Path, command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # of tests with a cluster in the same process
    put(tmp_path / "in.jsonl", '{"text": ""}\n')
    out = tmp_path / "out.jsonl"
    words = (tmp_path / "in.jsonl", "-o", out, "--prompt", "{text}", *NOWHERE, "--model", "a")
    assert command(*words)[0] == 0
    put(tmp_path / "out.jsonl.journal/0001-driver.jsonl", "")
    out.unlink()
    assert command("resume", out, "--model", "b", "--retry-failed")[0] == 0
    engines = json.loads((tmp_path / "out.jsonl.journal/job.json").read_text())["order"]["engines"]
    assert engines == {"url": NOWHERE[1], "model": "b"}
