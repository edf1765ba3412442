"""`penstock logs`: what the processes of a service on this machine write. Knows where Ray keeps it."""

import re
import sys
import time
from collections import deque
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, TextIO

import typer

from penstock.errors import ConfigError, Unavailable

_NAMES = {"LLMRouter": "gateway", "LLMControl": "control", "LLMJobs": "jobs"}
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
    from penstock.config.derive.serve_options import deployment_name

    (service,) = started.chosen(started.running(), [] if process is None else [process])
    if not service.logs:
        raise Unavailable(f"{service} has not started Ray yet; its own output says how far it is.")
    wanted = {*(names or ()), *(deployment_name(name, "") for name in names or ())}
    opened: dict[Path, TextIO] = {}
    is_empty = True
    with suppress(KeyboardInterrupt):
        while True:
            found = _files(Path(service.logs), service.name)
            chosen = {
                file: name
                for file, name in found.items()
                if not names or {name, name.partition(":")[2]} & wanted
            }
            if names and not chosen:
                there = ", ".join(sorted({*found.values()}))
                raise ConfigError(f"There is no {' or '.join(names)}; there are {there}.")
            for file, name in chosen.items():
                lines = opened.get(file) or opened.setdefault(file, file.open(errors="replace"))
                for line in deque((line for line in lines if not _OF_SERVE.match(line)), _SHOWN_LINES):
                    print(f"{name} | {line.rstrip()}", flush=True)
                    is_empty = False
            if not follow:
                if is_empty:
                    print("Nothing yet: no warning, no error, no print of your own.", file=sys.stderr)
                break
            time.sleep(_LOOK_S)
    return 0


def _files(folder: Path, app: str) -> dict[Path, str]:
    """The files of an application's processes with what wrote them, the oldest first."""
    found: dict[Path, str] = {}
    for file in sorted(folder.glob("worker-*.*"), key=lambda file: file.stat().st_mtime):
        with file.open(errors="replace") as lines:
            for line in islice(lines, _HEAD_LINES):
                if line.startswith(f"{_OWNER}{app}:"):
                    deployment = line.removeprefix(f"{_OWNER}{app}:").strip()
                    found[file] = _NAMES.get(deployment) or deployment.removeprefix("LLMServer:")
    return found
