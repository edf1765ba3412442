"""The likeliest mistakes of a first hour, from the manual's own table: each is told before a start."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import penstock

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "troubleshooting.md"
_, _, TABLE = PAGE.read_text().partition("## When something is wrong")
MISTAKES = re.findall(r"(?m)^\| `(penstock .*?)` \| `(.*?)` \|$", TABLE.partition("\n## ")[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    for name in ("my-model", "no-tokenizer", "bad-template", "cut"):
        shutil.copytree(penstock.demo_model(), folder / name)
    (folder / "empty").mkdir()
    (folder / "no-tokenizer" / "tokenizer.json").unlink()
    (folder / "bad-template" / "chat_template.jinja").write_text("{% if x %}")
    os.truncate(folder / "cut" / "model.safetensors", 1000)
    (folder / "rows.csv").write_text("question,price\nWhat?,3\n")
    (folder / "typo.yaml").write_text(
        "llm_configs:\n- model_loading_config: {model_id: m}\n  engine_kwarg: {}\n"
    )
    return folder


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_each_mistake_is_told_as_the_manual_says_and_nothing_is_started(folder: Path, taken: int):
    temporary = folder / "tmp"
    temporary.mkdir()
    free = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**free, "TMPDIR": str(temporary), "COLUMNS": "500"}

    def said(typed: str) -> str:
        _, *words = shlex.split(typed.replace("--port 9", f"--port {taken}"))
        command = [sys.executable, "-m", "penstock.cli", *words]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        assert done.returncode in (1, 2), typed
        return done.stderr + done.stdout

    assert len(MISTAKES) >= 20
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(said, (typed for typed, _ in MISTAKES)))
    wrong = {
        typed: answer
        for (typed, says), answer in zip(MISTAKES, answers, strict=True)
        if says.replace("Port 9 ", f"Port {taken} ") not in answer.replace(f"{folder}/", "")
    }
    assert not wrong
    assert not (temporary / "ray").exists()
