"""`pip install 'penstock[cpu]'` from a built wheel, in an environment that holds nothing else.

Its declared dependencies are linked from this environment, file by file, instead of being fetched again: what
pyproject.toml does not declare is not there. A cluster and an engine of its own: that is what is tested.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from demo_questions import QUESTIONS
from openai import OpenAI
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock import __version__

ROOT = Path(__file__).parents[2]
OURS = ("Dockerfile", "LICENSE", "README.md", "pyproject.toml", "src")
REMOVED = {"torchaudio", "torchcodec", "torchvision"}
"""See scripts/setup: they may be built for another torch, and serving text needs none of them."""
SHIM = "torchvision_beside_cpu_torch"
START_S = 240

pytestmark = [pytest.mark.full, pytest.mark.parity("S18")]


def wheel(folder: Path) -> Path:
    """Built from a copy: what an earlier build has left in the tree is not in it."""
    source = folder / "source"
    source.mkdir()
    for name in OURS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, source / name)
    for left in source.rglob("*.egg-info"):
        shutil.rmtree(left)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("penstock-*.whl")
    return built


def needed(root: Distribution, *extras: str) -> list[Distribution]:
    """What `root` needs, with these extras, and what that needs in turn: from this environment."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    to_do = [(root, extra) for extra in ("", *extras)]
    while to_do:
        each, extra = to_do.pop()
        for text in each.requires or ():
            wanted = Requirement(text)
            name = canonicalize_name(wanted.name)
            if name in REMOVED or (wanted.marker and not wanted.marker.evaluate({"extra": extra})):
                continue
            known = found.setdefault(name, distribution(name))
            fresh = {(name, extra) for extra in ("", *wanted.extras)} - seen
            seen |= fresh
            to_do += [(known, extra) for _, extra in fresh]
    return list(found.values())


def linked(found: Sequence[Distribution], packages: Path) -> None:
    """The files of distributions, with the bytecode that is there."""
    for each in found:
        for file in each.files or ():
            origin = Path(str(each.locate_file(file)))
            if ".." in file.parts or not origin.exists():
                continue
            link(origin, packages / file)
            code = origin.parent / "__pycache__" / f"{origin.stem}.{sys.implementation.cache_tag}.pyc"
            if origin.suffix == ".py" and code.exists():
                link(code, packages / file.parent / "__pycache__" / code.name)


def link(origin: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.symlink_to(origin)


def run(*words: str) -> None:
    bare = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))  # pip brings its own setuptools
    python = str(folder / "venv/bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", str(wheel(folder)))
    packages = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (penstock,) = distributions(name="penstock", path=[str(packages)])
    linked(needed(penstock, "cpu"), packages)
    for file in Path(sysconfig.get_path("purelib")).glob(f"{SHIM}.*"):  # see scripts/setup
        link(file, packages / file.name)
    return folder


CONFIG = "model_loading_config: {model_id: m}\nllm_engine: sim\n"


def said_by(environment: Path, *words: str) -> str:
    """What the wheel's `penstock` prints, in a folder of its own and an environment without variables."""
    home = environment / "commands"
    home.mkdir(exist_ok=True)
    (home / "m.yaml").write_text(CONFIG)
    done = subprocess.run(
        [str(environment / "venv/bin/penstock"), *words],
        cwd=home,
        env={"PATH": os.defpath, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_version_and_check_need_nothing_of_the_repository(environment: Path):
    said = dict(line.split(maxsplit=1) for line in said_by(environment, "version").splitlines())
    assert said["penstock"] == __version__
    assert said["vllm"] != "not installed"
    assert said_by(environment, "check", "m.yaml").endswith("No mistakes found.\n")


def test_the_wheel_serves_the_demo_model_from_an_empty_environment(environment: Path, free_port: int):
    home = environment / "home"
    home.mkdir()
    bare = {"PATH": os.defpath, "HOME": str(home), "PENSTOCK_ACCELERATOR": "cpu"}
    words = [str(environment / "venv/bin/penstock"), "serve", "--port", str(free_port)]
    with subprocess.Popen(words, cwd=home, env=bare, stderr=subprocess.PIPE, text=True) as served:
        try:
            wait_until_healthy(served, free_port)
            question, answer = next(iter(QUESTIONS.items()))
            client = OpenAI(base_url=f"http://127.0.0.1:{free_port}/v1", api_key="any")
            messages = [{"role": "user", "content": question}]
            said = client.chat.completions.create(model="penstock-demo", messages=messages, temperature=0)
            assert said.choices[0].message.content == answer
        finally:
            served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0


def wait_until_healthy(served: subprocess.Popen[str], port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert served.poll() is None, served.stderr and served.stderr.read()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise AssertionError(f"not healthy within {START_S} s")
