"""A newcomer's first hour at a terminal: each command as README prints it, with the real embedded model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.pages import ROOT
from tests.ports import unused

import penstock

pytestmark = pytest.mark.full

README = (ROOT / "README.md").read_text()
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
OF_OURS = re.compile(
    r"[✓✗⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏] +(Ray|Serve|Service|Engine arguments|penstock-demo) +\d+\.\d s.*|"
    r"Serving .*|curl .*|from openai .*|client = .*|messages = .*|answer = .*|print\(.*|penstock chat .*|"
    r"\^?C?Stopping; .*|\^C|"
)


class Terminal:
    """A command at a terminal of 200 columns, in `folder`."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {
                "TERM": "xterm",
                "COLUMNS": "200",
                "LINES": "50",
                "PENSTOCK_CACHE": f"{folder}/cache",
            }
            os.environ.update(environment, PENSTOCK_ACCELERATOR="cpu", PYTHONPATH=f"{ROOT}/src")
            os.environ.pop("RAY_ADDRESS", None)
            os.execv(sys.executable, [sys.executable, "-m", "penstock.cli", *words])
        self.said = ""

    def until(self, text: str, limit_s: float = 240.0) -> str:
        """All that it has written when it has written `text`."""
        deadline = time.monotonic() + limit_s
        while text not in self.said:
            assert time.monotonic() < deadline, self.said
            assert self._read(), self.said
        return self.said

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def end(self, limit_s: float = 240.0) -> tuple[int, str]:
        """Exit code, and all that it has written."""
        deadline = time.monotonic() + limit_s
        while self._read():
            assert time.monotonic() < deadline, self.said
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.said

    def _read(self) -> bool:
        """Whether more may come; waits for a second at most."""
        if select.select([self._fd], [], [], 1.0)[0]:
            try:
                self.said += _CONTROLS.sub("", os.read(self._fd, 65536).decode(errors="replace"))
            except OSError:  # nobody has the terminal any more
                return False
        return True


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my-model").symlink_to(penstock.demo_model())
    (tmp_path / "articles.csv").write_text("id,text,source\n1,Penstock feeds engines.,a\n2,Kettles boil.,b\n")
    return tmp_path


def printed(start: str) -> list[str]:
    """The words of README's first line that begins so, without its comment."""
    (line, *_) = re.findall(rf"(?m)^{re.escape(start)}.*$", README)
    return shlex.split(line, comments=True)[1:]


def test_from_a_check_to_answers_beside_a_table(folder: Path):
    code, said = Terminal(folder, *printed("penstock check ./my-model")).end()
    assert (code, "KV cache" in said, "No mistakes found." in said) == (0, True, True)
    code, said = Terminal(folder, *printed("penstock run ./my-model")).end()
    assert (code, said.splitlines()[0]) == (0, "Loading ./my-model ...")
    assert 2 <= len(said.splitlines()) < 10  # the answer, and nothing of vLLM's

    port = unused()
    url = f"http://127.0.0.1:{port}"
    service = Terminal(folder, "serve", "--port", str(port))
    try:
        service.until("penstock chat --url")
        code, said = Terminal(folder, *printed("penstock status"), "--url", url).end()
        assert (code, "penstock-demo  1 of 1 replicas ready" in said) == (0, True)

        chat = Terminal(folder, "chat", "--url", url)
        chat.until("/help shows more.")
        for line, answer in (
            ("What is Penstock?", "Penstock feeds LLM engines"),
            ("/svae talk.json", "There is no /svae; there are /model"),
            ("/save talk.json", "talk.json: 2 messages."),
        ):
            chat.type(f"{line}\n")
            chat.until(answer)
        chat.type("\x04")
        assert chat.end()[0] == 0
        assert [one["role"] for one in json.loads((folder / "talk.json").read_text())] == [
            "user",
            "assistant",
        ]

        trial = ["batch", "articles.csv", "-o", "answers.csv", "--prompt", "Summarise: {text}", "--url", url]
        code, said = Terminal(folder, *trial, "--limit", "1").end()
        head, row = (line.split() for line in said.splitlines() if re.match(r" +(id|1) ", line))
        assert (code, head, row[:4]) == (
            0,
            ["id", "text", "source", "generated_text"],
            ["1", "Penstock", "feeds", "engines."],
        )
        code, said = Terminal(folder, *trial).end()
        assert (code, "2 ok, 0 failed of 2" in said) == (0, True)
    finally:
        below = psutil.Process(service.pid).children(recursive=True)
        service.type("\x03")
        code, said = service.end()
    assert code == 0
    assert {line for line in re.split(r"[\r\n]+", said) if not OF_OURS.fullmatch(line.strip())} == set()
    assert [process for process in below if process.is_running() and process.status() != "zombie"] == []
    assert json.loads((folder / "cache" / "starts.json").read_text())["penstock-demo"].keys() >= {"load"}


def test_the_second_start_says_how_long_the_first_one_took(folder: Path):
    """With the simulator, whose start takes no time, and a made-up first one."""
    (folder / "cache").mkdir()
    (folder / "cache" / "starts.json").write_text('{"Service": {"deploying": 77.0}}')
    service = Terminal(folder, "serve", "--engine", "sim", "--port", str(unused()))
    service.until("of about 77 s")
    os.kill(service.pid, signal.SIGTERM)
    assert service.end()[0] in (0, 128 + signal.SIGTERM)
