"""Every command with every kind of bad input: it ends with a sentence: what, where, and what to do."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest import mock

import pytest

from penstock.cli import main
from penstock.cli.batch import run as batch_run
from penstock.cli.batch import submit
from penstock.cli.client.chat import _texts
from penstock.cli.client.fleet import _who
from penstock.cli.client.service import Service
from penstock.cli.models import check, precheck
from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.cli.process import guard
from penstock.cli.serve import startup
from penstock.config import Settings
from penstock.data.backends import ray_cluster
from penstock.errors import ConfigError, Error

NOBODY = "http://127.0.0.1:9"
"""The port of a service that no machine runs any more."""

GLOB = Path.glob

FILES = {
    "binary.yaml": b"\xff\xfe\x00",
    "empty.yaml": b"",
    "list.yaml": b"- 1\n",
    "open.yaml": b"a: [",
    "deep.yaml": b"[" * 400,
    "date.yaml": b"a: 2026-13-40",
    "itself.yaml": b"a: &a [*a]\n",
    "unknown.yaml": b"model_loading_config: {model_id: m}\nllm_engin: sim\n",
    "tag.yaml": b"a: !!bool maybe",
    "number.yaml": b"a: !!int ''",
    "long.yaml": b"model_loading_config: {model_id: m, model_source: /%b}" % (b"a" * 300),
    "keys.yaml": b"llm_configs: [demo.yaml]\ngateway: {keys_file: /%b}" % (b"a" * 300),
    "version.yaml": b"model_loading_config: {model_id: m}\nversions: [{name: a, model_loading_config: 5}]",
    "demo.yaml": b"model_loading_config: {model_id: m}\nllm_engine: sim\n",
    "list.jsonl": b"[1]",
    "huge.jsonl": b'{"timestamp": 1, "input_length": 1e999, "output_length": 5}',
    "prompts.jsonl": b"no JSON",
}
_FAULTY = [name for name in FILES if name.endswith(".yaml") and name not in ("demo.yaml", "long.yaml")]
LONG = "a" * 300
URLS = [
    *("", "http://", "ftp://host", "http://host:port", "http://[::1", f"http://{'a' * 64}"),
    *("http://a b", "http://host:0"),
]


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
    # The guard of a command ends every descendant of its process, here the engines of other tests.
    monkeypatch.setattr(guard, "guarded", lambda work, stop_s: work(0))
    monkeypatch.setattr(batch_run, "end_descendants", lambda: None)
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
    *((["check", name], name) for name in [*_FAULTY, "folder.yaml", "missing.yaml"]),
    (["serve", "long.yaml"], "long.yaml:1: model_loading_config.model_source: '/aaa"),
    (["check", f"/{LONG}"], "cannot be read: File name too long"),
    (["check", "demo", "--hf-overrides", "{"], "--hf-overrides:1:2: is not valid YAML"),
    (["check", "demo", "--hf-overrides", "3"], "--hf-overrides is '3'; must be a mapping"),
    (["check", "demo", "--max-model-len", "9" * 400], "must be a number"),
    (["check", "demo", "--gpu", f"{'9' * 400}GiB"], "unknown GPU"),
    (["check"], "Missing argument"),
    *((["serve", name], name) for name in ("binary.yaml", "unknown.yaml", "missing.yaml")),
    (["serve", "./no-such-model"], "no-such-model' does not exist"),
    (["serve", "--port", "0"], "--port"),
    (["serve", "--engine", "vlm"], "'vllm'"),
    (["serve", "--log-format", "xml"], "--log-format"),
    (["serve", "--engine", "sim", "--max-modl-len", "5"], "max_model_len"),
    (["serve", "--engine", "sim", "--prot", "5"], "--port"),
    (["serve", "--engine", "sim", "--max-model-len"], "needs a value"),
    (["serve", "--engine", "sim", "--reply", "["], "--reply:1:2: is not valid YAML"),
    (["serve", "--engine", "sim", "--host", LONG], "is not an address of this machine"),
    (["serve", "--engine", "sim", "--address", f"{LONG}:1"], "No Ray cluster answers"),
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
    *((["bench", url], "http://host:8000") for url in URLS[:6]),
    (["bench", NOBODY], "Nothing answers"),
    (["bench", NOBODY, "--concurrency", "x"], "--concurrency"),
    (["bench", NOBODY, "--slo", "ttft"], "--slo"),
    (["bench", NOBODY, "--prompts", "prompts.jsonl"], "prompts.jsonl, line 1"),
    (["bench", NOBODY, "--prompts", "missing.jsonl"], "missing.jsonl"),
    *((["bench", NOBODY, "--trace", name], name) for name in ("prompts.jsonl", "list.jsonl", "huge.jsonl")),
    (["history", "--from", f"/{LONG}"], "cannot be read: File name too long"),
    (["bench", NOBODY, "--body", "{"], "--body"),
    (["bench", NOBODY, "--json", "/no/such/folder"], "cannot be written"),
    (["batch", "rseume", "out.jsonl"], "Did you mean 'resume'"),
    (["batch", "in.jsonl", "-o", "out", "--modle", "demo"], "`penstock batch` has --model"),
    (
        ["batch", "in.jsonl", "-o", "out", "--url", NOBODY, "--conurrency", "5"],
        "`penstock batch` has --concurrency",
    ),
    (["batch", "missing.jsonl", "-o", "out.jsonl", "--model", "demo"], "There is no file"),
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


FOREIGN = [
    *(["models"], ["chat"], ["status"], ["batches", "list"], ["batches", "show", "x"], ["ctl", "status"]),
    *(["ctl", "sleep"], ["history"], ["usage"], ["audit"], ["rollback"], ["plan", "demo.yaml"]),
    *(["add", "demo"], ["remove", "m"], ["apply", "--from", "here"]),
]


class Elsewhere(BaseHTTPRequestHandler):
    """Any other server, whose errors are JSON, too."""

    status = 404

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(b'{"detail": "Not Found"}')

    do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("words", FOREIGN, ids=[" ".join(words) for words in FOREIGN])
def test_another_server_s_errors_end_with_a_sentence(words: list[str], elsewhere: str, ended):
    code, err = ended(*words, "--url", elsewhere)
    assert (code, "answered with status 404: {" in err) == (1, True), err


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ('{"error": "The engine is busy."}', "The engine is busy."),
        ('{"detail": 5', "no piece of one: data: {"),
        ('["a"]', "no piece of one"),
        ('{"choices": ["a"]}', "no piece of one"),
    ],
)
def test_an_event_of_another_server_ends_an_answer_with_a_sentence(event: str, says: str):
    usual = ['{"choices": [{"delta": {"content": "Hi"}}], "error": null}', '{"id": 1}', '{"choices": [{}]}']
    texts = _texts([f"data: {one}\n".encode() for one in (*usual, event)])
    assert next(texts) == "Hi"
    with pytest.raises(Error, match=re.escape(says)):
        next(texts)


@pytest.mark.parametrize("words", [["models"], ["chat"], ["status"]], ids=" ".join)
def test_an_answer_that_is_none_of_ours_ends_with_a_sentence(words, elsewhere, ended, monkeypatch):
    monkeypatch.setattr(Elsewhere, "status", 200)
    code, err = ended(*words, "--url", elsewhere)
    assert (code, "answered with status 200: {" in err) == (1, True), err


def test_who_has_no_name_applies_by_number(monkeypatch: pytest.MonkeyPatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)
    assert _who().startswith("user 4000000@")
    assert Settings.read({"PENSTOCK_CACHE": "/cache"}).cache_folder() == Path("/cache")


def test_a_misspelt_variable_is_told_by_each_command(ended, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_ACELERATOR", "cpu")
    code, err = ended("serve", "--engine", "sim")
    assert (code, "PENSTOCK_ACCELERATOR" in err) == (2, True)


def test_a_fault_of_ours_says_so_and_where_its_traceback_is(ended, patched):
    def broken(*_words: object, **_options: object) -> int:
        raise KeyError("lost")

    patched(check, "check", broken)
    code, err = ended("check", "any.yaml")
    assert code == 1
    assert "A fault of Penstock itself (KeyError: 'lost')" in err
    log = Path(re.findall(r"in (/\S+\.log);", err)[0])
    assert "def broken" not in log.read_text()
    assert "raise KeyError" in log.read_text()
    log.unlink()


class _Interrupted:
    """Ctrl-C while a class is made, as in an import: Python 3.11 raises a RuntimeError from it."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def _imports(*_words: object, **_options: object) -> int:
    type("Lazy", (), {"value": _Interrupted()})
    return 0


def test_ctrl_c_within_an_import_is_no_fault_of_ours(ended, patched):
    patched(check, "check", _imports)
    code, err = ended("check", "any.yaml")
    assert (code, "fault" in err) == (130, False), err


def test_ctrl_c_within_an_import_leaves_a_submitted_batch(ended, patched, tmp_path: Path):
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    patched(submit, "_known", _imports)
    code, err = ended("batch", str(source), "-o", str(tmp_path / "out.jsonl"), "--submit", NOBODY)
    assert (code, "The same command begins again." in err) == (130, True), err


def test_no_words_show_the_help(ended, capfd: pytest.CaptureFixture[str]):
    assert ended() == (0, "")


def test_serve_tells_all_mistakes_of_a_file_as_check_does(ended, folder: Path):
    wrong = "model_loading_config: {model_id: m}\nllm_engine: sim\nreplicas: 2\nengine_kwargs: {max_len: 3}\n"
    (folder / "two.yaml").write_text(wrong)
    for command in ("check", "serve"):
        code, err = ended(command, "two.yaml")
        assert (code, "'replicas'" in err, "max_len" in err) == (2, True, True)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of a job; any attempt to start Ray is a failure of the test."""
    monkeypatch.setattr(startup.Steps, "begin", lambda self: pytest.fail("Ray was started"))
    monkeypatch.setattr(ray_cluster, "init_ray", lambda **options: pytest.fail("Ray was started"))
    rows = Path("rows.jsonl")
    rows.write_text('{"prompt": "a"}\n')
    return rows


BEFORE_RAY = [
    (["demo", "--accelerator", "gpu"], 2, ["no node has a GPU", "--accelerator cpu"]),
    (["demo", "--accelerator", "H100"], 2, ["no node has a GPU", "--accelerator cpu"]),
    (["./no-such-model"], 2, ["no-such-model' does not exist on this machine"]),
    (["no-adapters.yaml"], 2, ["no-adapters.yaml:2", "no-such-adapters' does not exist on this machine"]),
    (["demo", "--max-modl-len", "5"], 2, ["unknown flag '--max-modl-len'; did you mean '--max-model-len'"]),
    (["unknown-argument.yaml"], 2, ["unknown-argument.yaml:2", "did you mean 'max_model_len'"]),
    (["demo", "--engine", "sglang"], 1, ["SGLang is not installed", "`python: /path/to/python`"]),
    (["program.yaml"], 1, ["there is no program 'no-such-program' on this machine"]),
]


@pytest.mark.parametrize(
    ("words", "code", "says"), BEFORE_RAY, ids=[" ".join(words) for words, *_ in BEFORE_RAY]
)
@pytest.mark.parametrize("verb", ["serve", "batch"])
@pytest.mark.usefixtures("no_ray")
def test_it_is_told_before_ray_starts(
    verb: str,
    words: list[str],
    code: int,
    says: list[str],
    ended,
    folder: Path,
    patched,
):
    patched(Path, "glob", lambda self, pattern: iter(()) if str(self) == "/dev" else GLOB(self, pattern))
    model = "model_loading_config: {model_id: m, model_source: demo}\n"
    adapters = "lora_config: {dynamic_lora_loading_path: ./no-such-adapters}\n"
    (folder / "no-adapters.yaml").write_text(f"{model}{adapters}")
    (folder / "unknown-argument.yaml").write_text(f"{model}engine_kwargs: {{max_modl_len: 5}}\n")
    (folder / "program.yaml").write_text(
        f"{model}llm_engine: process\nengine_kwargs: {{command: [no-such-program]}}\n"
    )
    batch = ["batch", "rows.jsonl", "-o", "out.jsonl", "--model"]
    ended_with, err = ended(*(["serve"] if verb == "serve" else batch), *words)
    assert (ended_with, [text for text in says if text not in err]) == (code, [])
    assert not (folder / "out.jsonl.journal").exists()


@pytest.mark.usefixtures("no_ray")
def test_a_vllm_that_is_missing_is_told_before_ray_starts(ended, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for words in (["serve", "demo"], ["batch", "rows.jsonl", "-o", "out.jsonl", "--model", "demo"]):
        code, err = ended(*words)
        assert (code, "vLLM is not installed" in err, "pip install" in err) == (1, True, True)


def test_what_the_nodes_of_a_cluster_may_have_is_not_refused_here(
    no_ray: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "gpu")  # as --accelerator H100 does
    plan = make_plan(Arguments(sources=("./on-the-nodes",), accelerator="H100"))
    assert precheck.checked(plan, "10.0.0.1:6379") == plan
    with pytest.raises(ConfigError, match="no node has a GPU"):
        precheck.checked(plan, None)


@pytest.mark.parametrize("around", ["{}\r\n", " {}\r", "{}"])
def test_a_key_out_of_a_file_is_sent_without_its_line_end(around: str):
    assert Service(NOBODY, around.format("pk_of-a-file"))._headers["authorization"] == "Bearer pk_of-a-file"


@pytest.mark.parametrize("key", ["pk_of-a\nfile", "pk_of-a\rfile", "“pk_of-a-file”"])
def test_a_key_that_no_header_can_have_is_refused_without_showing_it(key: str):
    with pytest.raises(ConfigError) as refused:
        Service(NOBODY, key)
    assert "pk_of" not in str(refused.value)
