"""Drives loadgen.c, the load generator: compiles it once, runs it, reads its numbers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_SOURCE = Path(__file__).with_name("loadgen.c")
_DRAIN_S = 60.0
CHAT = "/v1/chat/completions"


class Asked(Protocol):
    """What every request of a run asks for."""

    @property
    def tokens(self) -> int: ...

    def body(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of the load generator saw. `figures` is its JSON; see the head of loadgen.c."""

    streams: int
    tokens: int
    figures: dict[str, Any]

    @property
    def tokens_per_event(self) -> float:
        """1 unless a server merged tokens into one event; every good answer has exactly `tokens`."""
        events = self.figures["good_events_all"]
        return self.figures["requests_all"] * self.tokens / events if events else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of measured time."""
        return self.figures["events"] * self.tokens_per_event / self.figures["seconds"]

    @property
    def tokens_all(self) -> float:
        """Of the whole run, warm-up and end included: what CPU seconds are divided by."""
        return self.figures["events_all"] * self.tokens_per_event

    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by kind, of the whole run; empty when all was well."""
        return {kind: count for kind, count in self.figures["failures"].items() if count}


@functools.cache
def generator() -> Path:
    """The compiled load generator, in the user's cache folder.

    Raises: RuntimeError without a C compiler.
    """
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise RuntimeError("The load generator needs a C compiler (cc, gcc or clang) on the PATH.")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    binary = cache / f"loadgen-{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:12]}"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = binary.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, "-O2", "-o", str(unfinished), str(_SOURCE), "-lm"], check=True, timeout=60)
        unfinished.rename(binary)
    return binary


class Generator:
    """One run of the load generator, which may be waited for while something else goes on."""

    def __init__(
        self,
        port: int,
        workload: Asked,
        *,
        streams: int,
        warmup_s: float,
        seconds: float,
        drain_s: float = _DRAIN_S,
        headers: Sequence[str] = (),
        **more: float,
    ) -> None:
        """more: flags of loadgen.c by their names, `every`, `ramp`, `read_bytes`, `read_every`."""
        self._streams, self._tokens = streams, workload.tokens
        self._limit_s = warmup_s + seconds + drain_s + 30
        with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as body:
            json.dump(workload.body(), body)
        self._body = Path(body.name)
        flags = {"streams": streams, "warmup": warmup_s, "seconds": seconds, "drain": drain_s, **more}
        command = [generator(), "127.0.0.1", port, CHAT, body.name, *_words(flags)]
        command += [word for header in headers for word in ("--header", header)]
        self._process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, text=True)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Ends the measured time now; `result` has what was seen until then."""
        self._process.send_signal(signal.SIGTERM)

    def result(self) -> Load:
        """Waits for the end. Raises: RuntimeError when there was no result within the time limit."""
        try:
            out, _ = self._process.communicate(timeout=self._limit_s)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"The load generator was not done after {self._limit_s:g} s.") from error
        finally:
            self._process.kill()
            self._body.unlink()
        if self._process.returncode:
            raise RuntimeError(f"The load generator ended with code {self._process.returncode}.")
        return Load(self._streams, self._tokens, json.loads(out))


def _words(flags: Mapping[str, float]) -> list[str]:
    return [word for name, value in flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
