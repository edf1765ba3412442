"""Every command with every kind of bad input: it ends with a sentence: what, where, and what to do."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from penstock.cli import main
from penstock.cli.models import check
from penstock.cli.process import guard

NOBODY = "http://127.0.0.1:9"
"""The port of a service that no machine runs any more."""

FILES = {
    "binary.yaml": b"\xff\xfe\x00",
    "empty.yaml": b"",
    "list.yaml": b"- 1\n",
    "open.yaml": b"a: [",
    "deep.yaml": b"[" * 400,
    "date.yaml": b"a: 2026-13-40",
    "itself.yaml": b"a: &a [*a]\n",
    "unknown.yaml": b"model_loading_config: {model_id: m}\nllm_engin: sim\n",
    "prompts.jsonl": b"no JSON",
}
URLS = ["", "http://", "ftp://host", "http://host:port", "http://[::1", "http://a b", "http://host:0"]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was before, when a command has changed it for those that it starts."""
    with mock.patch.dict(os.environ):
        for name in ("RAY_ADDRESS", "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY"):
            os.environ.pop(name, None)
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # The guard of `serve` ends every descendant of its process, here the engines of other tests.
    monkeypatch.setattr(guard, "guarded", lambda work, stop_s: work(0))
    return tmp_path


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Exit code and stderr of a command."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *words])
        with pytest.raises(SystemExit) as exited:
            main()
        return int(exited.value.code or 0), capfd.readouterr().err

    return run


BAD: list[tuple[list[str], str]] = [
    *((["check", name], name) for name in [*list(FILES)[:-1], "folder.yaml", "missing.yaml"]),
    (["check"], "Missing argument"),
    *((["serve", name], name) for name in ("binary.yaml", "unknown.yaml", "missing.yaml")),
    (["serve", "./no-such-model"], "no-such-model' does not exist"),
    (["serve", "--port", "0"], "--port"),
    (["serve", "--engine", "vlm"], "'vllm'"),
    (["serve", "--log-format", "xml"], "--log-format"),
    (["serve", "--engine", "sim", "--max-modl-len", "5"], "max_model_len"),
    (["serve", "--engine", "sim", "--prot", "5"], "--port"),
    (["serve", "--engine", "sim", "--max-model-len"], "needs a value"),
    (["serve", "--replicas", "none"], "--replicas"),
    *((["chat", "--url", url], "http://host:8000") for url in URLS),
    (["chat", "--url", NOBODY], "Nothing answers"),
    *((["ctl", "status", "--url", url], "http://host:8000") for url in URLS),
    (["ctl", "status", "--url", NOBODY], "Nothing answers"),
    (["ctl"], "Missing command"),
    (["ctl", "statsu"], "Did you mean 'status'"),
    (["ctl", "pause", "--mode", "nonsense"], "abort"),
    (["ctl", "sleep", "--level", "3"], "--level"),
    (["ctl", "rpc", "method", "no JSON"], "not valid JSON"),
    *((["bench", url], "http://host:8000") for url in URLS[:5]),
    (["bench", NOBODY], "Nothing answers"),
    (["bench", NOBODY, "--concurrency", "x"], "--concurrency"),
    (["bench", NOBODY, "--slo", "ttft"], "--slo"),
    (["bench", NOBODY, "--prompts", "prompts.jsonl"], "prompts.jsonl, line 1"),
    (["bench", NOBODY, "--prompts", "missing.jsonl"], "missing.jsonl"),
    (["bench", NOBODY, "--trace", "prompts.jsonl"], "prompts.jsonl"),
    (["bench", NOBODY, "--body", "{"], "--body"),
    (["bench", NOBODY, "--json", "/no/such/folder"], "cannot be written"),
    (["sevre"], "Did you mean 'serve'"),
    (["--verison"], "--version"),
]


@pytest.mark.parametrize(("words", "says"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_ends_with_a_sentence(words: list[str], says: str, ended):
    code, err = ended(*words)
    said = re.sub(r"[\s│]+", " ", err)
    assert code in (1, 2)
    assert says in said
    assert "Traceback" not in said
    assert "fault of Penstock" not in said


def test_a_misspelt_variable_is_told_by_each_command(ended, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_ACELERATOR", "cpu")
    code, err = ended("serve", "--engine", "sim")
    assert (code, "PENSTOCK_ACCELERATOR" in err) == (2, True)


def test_a_fault_of_ours_says_so_and_where_its_traceback_is(ended, monkeypatch: pytest.MonkeyPatch):
    def broken(_files: object, **_options: object) -> int:
        raise KeyError("lost")

    monkeypatch.setattr(check, "check", broken)
    code, err = ended("check", "any.yaml")
    assert code == 1
    assert "A fault of Penstock itself (KeyError: 'lost')" in err
    log = Path(re.findall(r"in (/\S+\.log);", err)[0])
    assert "def broken" not in log.read_text()
    assert "raise KeyError" in log.read_text()
    log.unlink()


def test_no_words_show_the_help(ended, capfd: pytest.CaptureFixture[str]):
    assert ended() == (0, "")


def test_serve_tells_all_mistakes_of_a_file_as_check_does(ended, folder: Path):
    wrong = "model_loading_config: {model_id: m}\nllm_engine: sim\nreplicas: 2\nengine_kwargs: {max_len: 3}\n"
    (folder / "two.yaml").write_text(wrong)
    for command in ("check", "serve"):
        code, err = ended(command, "two.yaml")
        assert (code, "'replicas'" in err, "max_len" in err) == (2, True, True)


def test_a_gpu_that_is_not_there_is_told_before_ray_starts(ended, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    code, err = ended("serve", "demo", "--accelerator", "gpu")
    assert (code, "no node has a GPU" in err, "--accelerator cpu" in err) == (2, True, True)
