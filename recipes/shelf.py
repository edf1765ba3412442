"""Where made models lie: `~/.cache/penstock/recipes/NAME-HASH`, once per machine, whoever asks and how often.

The hash is one of the recipe's own files and of what it shares with others, so a changed recipe is made anew.
A model is made in a process of its own, on one thread: its seeds, threads and memory are nobody else's. Where
one seed does not pass the exam, the next one may.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

RECIPES = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "recipes"

_SHARED = re.compile(r"^from recipes\.(\w+) import", re.MULTILINE)
_MAKE = """import sys
from pathlib import Path
from recipes import NotLearned
from recipes.{name}.recipe import make
try:
    print(make(Path(sys.argv[1]), int(sys.argv[2])))
except NotLearned as fault:
    print(fault, file=sys.stderr)
    sys.exit({not_learned})
"""
_NOT_LEARNED = 3
_EXAM = "exam.txt"
SEEDS = (0, 1, 2)


class RecipeFailed(Exception):
    """A model could not be made; says what its recipe wrote last."""


class _NotLearned(RecipeFailed):
    """Another seed may do."""


def names() -> list[str]:
    """Every recipe here."""
    return sorted(file.parent.name for file in RECIPES.glob("*/recipe.py"))


def about(name: str) -> str:
    """The first line of its recipe."""
    return (ast.get_docstring(ast.parse(_recipe(name).read_text())) or "").partition("\n")[0]


def place(name: str) -> Path:
    """The folder of its model, made or not."""
    digest = hashlib.sha256()
    for file in _files(name):
        digest.update(f"{file.relative_to(RECIPES)}\0".encode() + file.read_bytes() + b"\0")
    return CACHE / f"{name}-{digest.hexdigest()[:12]}"


def exam(name: str) -> str | None:
    """What its exam said and how long it took to make; None when it is not made."""
    file = place(name) / _EXAM
    return file.read_text().strip() if file.exists() else None


def made(name: str) -> Path:
    """The folder of its model, which is made now if it is not there. One process makes it, others wait.

    Raises: RecipeFailed.
    """
    folder = place(name)
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_suffix(".lock")):
            if not folder.exists():
                _make(name, folder)
    return folder


def tried(name: str, seed: int) -> str:
    """What the exam says of a model from this seed, which is thrown away.

    Raises: RecipeFailed.
    """
    with tempfile.TemporaryDirectory(prefix=f"{name}-tried-") as folder:
        return _examined(name, Path(folder), [seed])


def _make(name: str, folder: Path) -> None:
    draft = Path(tempfile.mkdtemp(prefix=f"{name}-draft-", dir=CACHE))
    try:
        (draft / _EXAM).write_text(_examined(name, draft, SEEDS) + "\n")
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _examined(name: str, out: Path, seeds: Sequence[int]) -> str:
    """Makes the model from the first of `seeds` that passes; says what came of it."""
    began, failures = time.monotonic(), list[str]()
    for seed in seeds:
        try:
            said = _run(name, out, seed)
        except _NotLearned as failed:
            failures.append(str(failed))
            shutil.rmtree(out)
            out.mkdir()
        else:
            sentence = said.strip().rpartition("\n")[2]
            return f"{sentence} Made in {time.monotonic() - began:.0f} s, from seed {seed}."
    raise RecipeFailed("\n".join(failures))


def _run(name: str, out: Path, seed: int) -> str:
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    make = _MAKE.format(name=name, not_learned=_NOT_LEARNED)
    command = [sys.executable, "-c", make, str(out), str(seed)]
    environment = os.environ | quiet | one_thread
    done = subprocess.run(command, cwd=RECIPES.parent, env=environment, capture_output=True, text=True)
    if done.returncode == _NOT_LEARNED:
        raise _NotLearned(f"The recipe '{name}' failed with seed {seed}: {done.stderr.strip()[-2000:]}")
    if done.returncode:
        last = (done.stderr or done.stdout).strip()[-2000:]
        raise RecipeFailed(f"The recipe '{name}' failed with status {done.returncode}: {last}")
    return done.stdout


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Held by one process of this machine; the kernel gives it back when that dies."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _files(name: str) -> list[Path]:
    """The recipe's own and those that it imports from `recipes`, in a fixed order."""
    own = sorted(
        file for file in _recipe(name).parent.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
    shared = {found for file in own if file.suffix == ".py" for found in _SHARED.findall(file.read_text())}
    return own + [RECIPES / f"{module}.py" for module in sorted(shared)]


def _recipe(name: str) -> Path:
    file = RECIPES / name / "recipe.py"
    if not file.exists():
        raise RecipeFailed(f"There is no recipe '{name}'; there are {', '.join(names())}.")
    return file
