"""`penstock logs`: what the processes of a service on this machine write. Knows where Ray keeps it."""

import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import ConfigError, Unavailable

_PARTS = {"gateway": "LLMRouter", "control": "LLMControl", "jobs": "LLMJobs"}
_OWNER = ":actor_name:ServeReplica:"
"""How the first lines of a process's file name its deployment."""

_HEAD_LINES, _SHOWN_LINES = 10, 200
_LOOK_S = 0.5
_OF_SERVE = re.compile(r":(job_id|actor_name):|INFO \d{4}-\d\d-\d\d \S+ \S+ \S+ .*-- ")  # Ray Serve's own


def logs(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="A model, `gateway`, `control` or `jobs`.", show_default="all"
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    process: Annotated[
        int | None, typer.Option(help="Which service, where several run.", show_default=False)
    ] = None,
) -> int:
    """Show what the processes of a service here have written: warnings, errors, your own prints.

    The last 200 lines of each process, those that have ended too. Processes on other nodes are not shown.

    - `penstock logs`
    - `penstock logs qwen --follow`
    """
    from penstock.cli.serve import started

    (service,) = started.chosen(started.running(), [] if process is None else [process])
    if not service.logs:
        raise Unavailable(f"{service} has not started Ray yet; its own output says how far it is.")
    tails: dict[Path, _Tail] = {}
    try:
        while True:
            found = list(_files(Path(service.logs), service.name))
            for file, part in found:
                if file not in tails and (not names or any(_is(name, part) for name in names)):
                    tails[file] = _Tail(file, part)
            if names and not tails:
                there = ", ".join(sorted({_shown(part) for _, part in found}))
                raise ConfigError(f"There is no {' or '.join(names)}; there are {there}.")
            for tail in tails.values():
                for line in tail.read():
                    print(f"{tail.name} | {line}", flush=True)
            if not follow:
                return 0
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return 0


class _Tail:
    """What is new in a file."""

    def __init__(self, file: Path, part: str) -> None:
        self.name = _shown(part)
        self._file = file.open(errors="replace")

    def read(self) -> Sequence[str]:
        """The last lines that were not read yet, without those of Ray Serve."""
        lines = (line.rstrip("\n") for line in self._file if not _OF_SERVE.match(line))
        return deque(lines, _SHOWN_LINES)


def _files(folder: Path, app: str) -> Iterator[tuple[Path, str]]:
    """The files of an application's processes with their deployments, the oldest first."""
    for file in sorted(folder.glob("worker-*.*"), key=lambda file: file.stat().st_mtime):
        with file.open(errors="replace") as lines:
            for line in islice(lines, _HEAD_LINES):
                if line.startswith(f"{_OWNER}{app}:"):
                    yield file, line.removeprefix(f"{_OWNER}{app}:").strip()


def _shown(deployment: str) -> str:
    known = {deployment: name for name, deployment in _PARTS.items()}
    return known.get(deployment) or deployment.removeprefix("LLMServer:")


def _is(name: str, deployment: str) -> bool:
    from penstock.config.derive.serve_options import deployment_name

    return deployment in (name, _PARTS.get(name)) or deployment.partition(":")[2] == deployment_name(name, "")
