"""The services that `penstock serve` runs here, for `penstock stop`: each notes itself in its own folder.

A note counts while the process lives that it names; nothing has to be cleaned up after a kill.
"""

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import psutil

from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import ServePlan, is_file
from penstock.errors import ConfigError, Unavailable

KIND = "serve"
"""Of the folder that each service has in the directory for temporary files."""

_NOTE = "service.json"
_END_S = 40.0  # the guard of a service needs at most 28
_CLOCK_S = 2.0  # a process's start is counted from the machine's, which a correction of the clock moves


@dataclass(frozen=True, slots=True)
class Started:
    """A service. id: of the process that signals go to; begun: its start, in seconds since 1970. name: of its
    application. logs: where Ray writes on this node, "" before Ray runs. file: all that it was started with,
    "" for several files or none.
    """

    id: int
    begun: float
    url: str
    models: tuple[str, ...]
    name: str = ""
    logs: str = ""
    file: str = ""

    def process(self) -> psutil.Process | None:
        """None when it has ended, also when another process has its number now."""
        try:
            process = psutil.Process(self.id)
            is_same = abs(process.create_time() - self.begun) < _CLOCK_S
            alive = is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return None
        return process if alive else None

    def __str__(self) -> str:
        return f"{', '.join(self.models)} at {self.url} (process {self.id})"


def note(folder: Path, plan: ServePlan, arguments: Arguments, logs: str = "") -> None:
    """Notes this service, which runs below the process that guards it."""
    guard = psutil.Process(os.getppid())
    models = tuple(config.model_id for config in plan.configs)
    url, sources = plan.gateway.local_url, arguments.sources
    file = os.path.abspath(sources[0]) if len(sources) == 1 and is_file(sources[0]) else ""
    started = Started(guard.pid, guard.create_time(), url, models, arguments.name, logs, file)
    (folder / _NOTE).write_text(json.dumps(asdict(started)))


def running() -> list[Started]:
    """The services of this user that run on this machine, in the order in which they were started."""
    found: list[Started] = []
    for file in Path(tempfile.gettempdir()).glob(f"penstock-{KIND}-*/{_NOTE}"):
        with suppress(OSError, msgspec.MsgspecError):
            if file.parent.stat().st_uid != os.geteuid():
                continue  # written by someone else: its number could be that of any process of ours
            found.append(msgspec.json.decode(file.read_bytes(), type=Started))
    return sorted((one for one in found if one.process() is not None), key=lambda one: one.begun)


def stop(ids: Sequence[int], *, as_json: bool = False) -> int:
    """Ends services as Ctrl-C does, and prints which. Without `ids` the only one.

    Exit code: 0 when they have ended.
    Raises: Unavailable when none runs, or one does not end; ConfigError when it is not clear which to end.
    """
    services = chosen(running(), ids)
    ended: list[dict[str, object]] = []
    for one in services:
        if not as_json:
            print(f"Stopping {one}; open streams have 20 s to finish.", flush=True)
        seconds = _end(one)
        ended.append({"id": one.id, "url": one.url, "models": one.models, "seconds": round(seconds, 1)})
        if not as_json:
            print(f"Stopped after {seconds:.1f} s.", flush=True)
    if as_json:
        print(json.dumps(ended, indent=2))
    return 0


def chosen(there: Sequence[Started], ids: Sequence[int]) -> list[Started]:
    """The services of these processes, by default the only one. Raises: Unavailable, ConfigError."""
    if not there:
        raise Unavailable("No service runs here that `penstock serve` of this user started.")
    known = {one.id: one for one in there}
    shown = "; ".join(map(str, there))
    if unknown := [str(one) for one in ids if one not in known]:
        raise ConfigError(f"No service of yours is process {', '.join(unknown)}. Running here: {shown}.")
    if not ids and len(there) > 1:
        raise ConfigError(f"{len(there)} services run here; say which by its process: {shown}.")
    return [known[one] for one in dict.fromkeys(ids)] or list(there)


def _end(one: Started) -> float:
    """Seconds until it was gone. Raises: Unavailable when it is not."""
    begun = time.monotonic()
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(one.id)  # from here on it is this process, or none
        try:
            if one.process() is not None:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                if not select.select([handle], [], [], _END_S)[0]:
                    raise Unavailable(f"{one} has not ended within {_END_S:g} s. `kill -9 {one.id}` ends it.")
        finally:
            os.close(handle)
    return time.monotonic() - begun
