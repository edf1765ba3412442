"""Runs a Dockerfile's steps in a clean root file system, for machines on which no engine can build images.

    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm ROOT
    python -m scripts.image_steps Dockerfile ROOT

Needs root. Each stage is a copy of ROOT in which its steps run by chroot; ROOT stands in for the base images.
At the end the entry point runs as the image's user until the health check passes and SIGTERM ends it. Prints
a line for each step: run, changed (how) or not run (why). Exit code: 0 when all that could be tried works.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parents[1]
PYTORCH = "--index-url https://download.pytorch.org/whl/cpu"
_START_S, _STOP_S = 300.0, 60.0
_MOUNTS = """
mount -t proc proc {root}/proc
mount --rbind /dev {root}/dev
mount -t tmpfs -o mode=1777 tmpfs {root}/dev/shm
for folder in {binds}; do mkdir -p {root}$folder && mount --bind $folder {root}$folder; done
exec chroot --userspec={user} {root} /bin/sh -c {command}
"""


@dataclass
class Stage:
    """A file system under work, and what later instructions of its stage have set."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    health: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and value of each, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, value = line.strip().partition(" ")
            yield name.upper(), value.strip()


class Image:
    """One Dockerfile on its way through."""

    def __init__(self, base: Path, work: Path, binds: Sequence[str]) -> None:
        self._base, self._work, self._binds = base, work, binds
        self.stages: dict[str, Stage] = {}
        self.last = Stage(base)

    def take(self, name: str, value: str) -> str:
        """Does one instruction; gives what became of it. Raises: CalledProcessError."""
        return getattr(self, f"_{name.lower()}")(value)

    def _from(self, value: str) -> str:
        image, _, name = value.partition(" AS ")
        root = self._work / (name or "last")
        subprocess.run(["cp", "-a", str(self._base), str(root)], check=True)
        for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
            if Path(file).exists():
                shutil.copyfile(file, root / file.lstrip("/"))
        python = root / "usr/local/bin/python"  # python's own images have this name
        python.unlink(missing_ok=True)
        python.symlink_to("/usr/bin/python3")
        self.last = self.stages[name] = Stage(root)
        return f"changed: the root file system given stands in for {image}"

    def _run(self, value: str) -> str:
        try:
            self.run(value)
        except subprocess.CalledProcessError:
            if PYTORCH not in value:
                raise
            self.run(re.sub(r"\s+(torchvision|torchaudio)\b", "", value.replace(PYTORCH, "")))
            return "changed: PyTorch's index cannot be reached; torch alone, from the configured index"
        return "run"

    def _env(self, value: str) -> str:
        for word in shlex.split(value):
            name, _, text = word.partition("=")
            self.last.variables[name] = text.replace("$PATH", self._environment()["PATH"])
        return "run"

    def _workdir(self, value: str) -> str:
        (self.last.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.last.folder = value
        return "run"

    def _copy(self, value: str) -> str:
        *sources, target = value.split()
        where = HERE
        if sources[0].startswith("--from="):
            where = self.stages[sources.pop(0).removeprefix("--from=")].root
        into = self.last.root / os.path.join(self.last.folder, target).lstrip("/")
        for source in sources:
            origin = where / source.lstrip("/")
            to = into / origin.name if len(sources) > 1 or target.endswith("/") else into
            to.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", "--no-target-directory", str(origin), str(to)], check=True)
        return "run"

    def _user(self, value: str) -> str:
        self.last.user = f"{value}:{value}"
        return "run"

    def _expose(self, value: str) -> str:
        return "not run: it only informs"

    def _healthcheck(self, value: str) -> str:
        self.last.health = json.loads(value.partition("CMD ")[2])
        return "run at the end"

    def _entrypoint(self, value: str) -> str:
        self.last.entry = json.loads(value)
        return "run at the end"

    def run(self, command: str) -> None:
        """As a RUN step. Raises: CalledProcessError."""
        subprocess.run(self._words(command), check=True, stdout=sys.stderr, env=self._environment())

    def serve(self, *words: str) -> str:
        """Starts the entry point, waits for the health check, stops it. Raises: RuntimeError."""
        command = shlex.join([*self.last.entry, *words])
        served = subprocess.Popen(self._words(f"exec {command}"), stdout=sys.stderr, env=self._environment())
        try:
            deadline = time.monotonic() + _START_S
            while subprocess.run(
                self._words(shlex.join(self.last.health)), env=self._environment(), stderr=subprocess.DEVNULL
            ).returncode:
                if served.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command} was not healthy within {_START_S:g} s")
                time.sleep(1)
            served.send_signal(signal.SIGTERM)
            if code := served.wait(_STOP_S):
                raise RuntimeError(f"{command} ended with {code} after SIGTERM")
        finally:
            served.kill()
        return f"run as {self.last.user}: {command}; healthy, and 0 after SIGTERM"

    def _words(self, command: str) -> list[str]:
        """A mount namespace of its own: nothing stays mounted. `exec` keeps one process to be signalled."""
        inner = f"cd {shlex.quote(self.last.folder)} && {command}"
        script = _MOUNTS.format(
            root=shlex.quote(str(self.last.root)),
            binds=" ".join(map(shlex.quote, self._binds)),
            user=self.last.user,
            command=shlex.quote(inner),
        )
        return ["unshare", "--mount", "sh", "-ec", script]

    def _environment(self) -> dict[str, str]:
        of_pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
        home = "/root" if self.last.user == "0:0" else "/home/penstock"
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {
            "PATH": path,
            "HOME": home,
            "DEBIAN_FRONTEND": "noninteractive",
            **of_pip,
            **self.last.variables,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a Dockerfile's steps by chroot.")
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path, help="A clean root file system; it is copied.")
    parser.add_argument(
        "--bind", action="append", default=[], help="A folder of this machine that pip needs."
    )
    parser.add_argument(
        "--after", action="append", default=[], help="A command after the last RUN of a build."
    )
    parser.add_argument("--serve", default="", help="Arguments of the entry point.")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-image-", dir=given.root.parent) as folder:
        image = Image(given.root.resolve(), Path(folder), given.bind)
        for name, value in instructions(given.dockerfile.read_text()):
            if name == "COPY" and "--from=build" in value:
                _extra(image, given.after)
            print(f"{name} {value[:70]}\n    {image.take(name, value)}", flush=True)
        print(f"ENTRYPOINT\n    {image.serve(*shlex.split(given.serve))}")
    return 0


def _extra(image: Image, commands: Sequence[str]) -> None:
    """What this machine's registry makes necessary, in the build stage."""
    last, image.last = image.last, image.stages["build"]
    for command in commands:
        image.run(command)
        print(f"not in the Dockerfile: {command}", flush=True)
    image.last = last


if __name__ == "__main__":
    sys.exit(main())
