"""Batch jobs under `kill -9`: rows lost, rows doubled, work done again.

    python -m benchmarks.faults [--victim driver,commit,actor,replica,core] [--runs 20] [--rows 2000]

Each run is one `penstock batch` of its own. One process of it is killed at a moment drawn evenly from a seed,
between the first kept row and the end of a run that nobody disturbed; `commit` instead waits for the sink to
write its file. A driver that was killed is started again by the same command. `judge` compares the files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil

from benchmarks import processes
from benchmarks.command import choices, cleaned_up, say
from benchmarks.judge import Verdict, judge
from benchmarks.table import Row, markdown

VICTIMS = ("driver", "commit", "actor", "replica", "core")
_TITLES = {
    "driver": "driver",
    "commit": "driver, while the sink writes",
    "actor": "an engine's actor",
    "replica": "a replica of the service",
    "core": "vLLM's engine core",
}
PROCESSES = {
    "actor": "ray::_WorkerActor",
    "replica": "ray::ServeReplica:",
    "core": "penstock.engines.vllm.core.process",
}
_OPTIONS = {"step_base_ms": 5, "max_num_seqs": 32}
_START_S, _RUN_S = 180.0, 300.0

Words = list[str]


@dataclass(frozen=True, slots=True)
class Run:
    """One job with one kill. hit: whether the victim still lived. again: answers that the journal has beyond
    one a row. calm_s: without a kill.
    """

    victim: str
    hit: bool
    kill_s: float
    took_s: float
    calm_s: float
    again: int
    verdict: Verdict


class Bench:
    """One victim's runs: who answers, and how the command names them."""

    def __init__(self, victim: str, words: Words, folder: Path, rows: int) -> None:
        self.victim, self._words, self._folder = victim, words, folder
        self.given = folder / "in.jsonl"
        texts = (f"{number} " * (number % 7 + 1) for number in range(rows))
        lines = (json.dumps({"id": n, "prompt": text, "max_tokens": 20}) for n, text in enumerate(texts))
        self.given.write_text("".join(f"{line}\n" for line in lines))

    def calm(self) -> float:
        """Seconds from the first kept row to the end, undisturbed."""
        return self.run(None).took_s

    def run(self, kill_s: float | None, calm_s: float = 0.0) -> Run:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        output = folder / "out.jsonl"
        process = self._started(output)
        _until(lambda: _kept(output) > 0 or process.poll() is not None, _START_S)
        began = time.monotonic()
        hit = kill_s is not None and self._kill(process, output, began + kill_s)
        while process.wait(_RUN_S) != 0:
            if self.victim not in ("driver", "commit"):
                raise SystemExit(f"the command failed: {(folder / 'log').read_text()[-2000:]}")
            process = self._started(output)
        took = time.monotonic() - began
        verdict = judge(self.given, output, folder / "out.failed.jsonl", echo=self.victim != "core")
        again = _kept(output) - verdict.rows
        shutil.rmtree(folder)
        return Run(self.victim, hit, kill_s or 0.0, took, calm_s, again, verdict)

    def _started(self, output: Path) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "penstock.cli", "batch", str(self.given), "-o", str(output)]
        with (output.parent / "log").open("ab") as log:
            return subprocess.Popen([*words, *self._words], stdout=log, stderr=log)

    def _kill(self, process: subprocess.Popen[bytes], output: Path, at: float) -> bool:
        if self.victim == "commit":
            _until(lambda: _writing(output) or process.poll() is not None, _RUN_S, look_s=0.0005)
        else:
            time.sleep(max(0.0, at - time.monotonic()))
        if (victim := self._found(process)) is None:
            return False
        victim.kill()
        return True

    def _found(self, process: subprocess.Popen[bytes]) -> psutil.Process | None:
        if self.victim in ("driver", "commit"):
            try:
                return next(iter(psutil.Process(process.pid).children()), None)
            except psutil.NoSuchProcess:
                return None
        named = [one for one in processes.descendants() if PROCESSES[self.victim] in processes.title(one)]
        if self.victim == "replica":
            named = [one for one in named if "Router" not in processes.title(one)]
        return random.choice(named) if named else None


def _kept(output: Path) -> int:
    folder = output.with_name(output.name + ".journal")
    return sum(file.read_bytes().count(b'"end"') for file in folder.glob("*-engine-*.jsonl"))


def _writing(output: Path) -> bool:
    return any(output.parent.glob(f".{output.name}.*.unfinished"))


def _until(true: Callable[[], bool], limit_s: float, look_s: float = 0.01) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing happened within {limit_s:g} s")
        time.sleep(look_s)


@contextmanager
def _answering(victim: str) -> Iterator[Words]:
    """Whoever answers, started once for all runs; how the command names them."""
    if victim in ("actor", "core"):
        with _cluster() as address:
            sim = [
                "--engine",
                "sim",
                *(word for name, value in _OPTIONS.items() for word in _flag(name, value)),
            ]
            model = sim if victim == "actor" else ["--model", "demo"]
            yield [*model, "--replicas", "2" if victim == "actor" else "1", "--address", address]
        return
    port = _free_port()
    service = [sys.executable, "-m", "benchmarks.simulated", str(port), json.dumps(_OPTIONS)]
    if victim == "replica":
        flags = [word for name, value in _OPTIONS.items() for word in _flag(name, value)]
        service = [sys.executable, "-m", "penstock.cli", "serve", "--engine", "sim", "--port", str(port)]
        service += ["--replicas", "2", *flags]
    process = subprocess.Popen(service, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: _healthy(port), _START_S, 0.2)
        yield ["--url", f"http://127.0.0.1:{port}", "--concurrency", "64"]
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def _cluster() -> Iterator[str]:
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    context = ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def _flag(name: str, value: object) -> Words:
    return [f"--{name.replace('_', '-')}", str(value)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def _table(runs: list[Run]) -> str:
    head = (
        "killed",
        "runs",
        "hit",
        "rows each",
        "lost",
        "double",
        "strange",
        "answered again",
        "time / undisturbed",
    )
    rows: list[Row] = []
    for victim in dict.fromkeys(run.victim for run in runs):
        mine = [run for run in runs if run.victim == victim]
        totals = [sum(getattr(run.verdict, name) for run in mine) for name in ("lost", "double", "strange")]
        again = sum(run.again for run in mine) / sum(run.verdict.rows for run in mine)
        slower = sum(run.took_s for run in mine) / sum(run.calm_s for run in mine)
        rows.append(
            (
                _TITLES[victim],
                str(len(mine)),
                str(sum(run.hit for run in mine)),
                f"{mine[0].verdict.rows:,}",
                *map(str, totals),
                f"{again:.2%}",
                f"{slower:.2f}",
            )
        )
    return markdown(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--victim", type=choices(VICTIMS), default=list(VICTIMS[:4]))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    moments, runs = random.Random(options.seed), list[Run]()
    with cleaned_up(), tempfile.TemporaryDirectory() as folder:
        for victim in options.victim:
            with _answering(victim) as words:
                place = Path(folder) / victim
                place.mkdir()
                bench = Bench(victim, words, place, options.rows)
                calm = bench.calm()
                for number in range(options.runs):
                    runs.append(bench.run(moments.uniform(0, calm), calm))
                    say(f"{victim} {number + 1}: {runs[-1].kill_s:.2f} s of {calm:.2f}: {runs[-1].verdict}")
    print(_table(runs))
    if options.json:
        options.json.write_text(json.dumps([asdict(run) for run in runs], indent=1))
    return 0 if all(run.verdict.good for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
