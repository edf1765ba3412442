"""What a user notices when a process of the service is killed or stopped under load.

    python -m benchmarks.failures [--victim engine,gateway,...] [--replicas 1,2] [--kills 3] [--json FILE]
    python -m benchmarks.failures --gang --victim engine,replica --replicas 2

`penstock serve` runs, the load generator asks, SIGKILL hits one process, or SIGSTOP an engine ("stalled");
when all is as before, one more. The gateway's own /health, asked every 10 ms, says when a replica left its
rotation and when all were back; while it does not answer, none is in rotation. Serve's controller and the
deployment that keeps desired state take no requests: they are back when their successor runs. "--gang":
replicas that compute together (`data_parallel_size`) and end together; they are out when none is in rotation.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import processes
from benchmarks.command import add_common, choices, cleaned_up, numbers, refuse_strangers, say
from benchmarks.contestants import Contestant, DidNotStart, Running, penstock_serve
from benchmarks.load import Generator
from benchmarks.table import Row, markdown
from benchmarks.workload import EXECUTORS, MODEL_ID, Workload
from recipes import shelf


@dataclass(frozen=True, slots=True)
class Victim:
    """A kind of process, by its title, and the signal that hits it.

    is_replica: it, or an engine of one. takes_requests: without it requests wait or fail.
    """

    title: re.Pattern[str]
    signal: signal.Signals = signal.SIGKILL
    is_replica: bool = False
    takes_requests: bool = True


_ENGINE = re.compile(r"VLLM::EngineCore|penstock\.engines\.vllm\.core")
VICTIMS = {
    "engine": Victim(_ENGINE, is_replica=True),
    "replica": Victim(re.compile(r"ray::ServeReplica:.*:LLMServer"), is_replica=True),
    "stalled": Victim(_ENGINE, signal.SIGSTOP, is_replica=True),
    "gateway": Victim(re.compile(r"ray::ServeReplica:.*:LLMRouter")),
    "control": Victim(re.compile(r"ray::ServeReplica:.*:LLMControl"), takes_requests=False),
    "controller": Victim(re.compile(r"ray::ServeController"), takes_requests=False),
}

_UNDISTURBED_S, _AFTERWARDS_S = 5.0, 3.0
_OUT_LIMIT_S, _BACK_LIMIT_S = 15.0, 120.0
_LOAD_LIMIT_S = _UNDISTURBED_S + _OUT_LIMIT_S + _BACK_LIMIT_S + _AFTERWARDS_S
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Outcome:
    """One kill. out_after_s, back_after_s: seconds from it; None when it did not happen in time.

    moved: requests that went to another replica, or waited for one, because no byte of theirs had come.
    engines_left: the killed replica's engine processes that were there when a new one was back.
    left_over: processes that were there after `penstock serve` had stopped; told with its last kill.
    """

    victim: str
    replicas: int
    good: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    longest_silence_s: float = 0.0
    out_after_s: float | None = None
    back_after_s: float | None = None
    engines_left: int = 0
    left_over: tuple[str, ...] = ()
    problem: str = ""

    @property
    def clean(self) -> bool:
        """Whether all came back and nothing was left."""
        return self.back_after_s is not None and not (self.engines_left or self.left_over or self.problem)


class Rotation:
    """How many replicas the gateway has in rotation over time, by its own word."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._seen: list[tuple[float, int]] = []
        self._ended = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def first(self, counts: Container[int], since: float, limit_s: float) -> float | None:
        """When, after `since`, the number was first one of `counts`; waits for it up to the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for at, count in list(self._seen):
                if at >= since and count in counts:
                    return at
            time.sleep(_LOOK_S)
        return None

    def end(self) -> None:
        """Asks no more."""
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                count = _ready(self._port)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                count = 0
            self._seen.append((time.monotonic(), count))


def _ready(port: int) -> int:
    return json.loads(_get(port, "/health"))["models"][MODEL_ID]["ready"]


def _moved(port: int) -> int:
    found = re.findall(rb"^penstock_failovers_total\{[^}]*\} (\S+)", _get(port, "/metrics"), re.MULTILINE)
    return sum(int(float(count)) for count in found)


def _get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().read()


def main() -> int:
    """Exit code 1 when a replica did not come back, or a process was left over."""
    options = _options()
    outcomes: list[Outcome] = []
    with cleaned_up():
        for replicas in options.replicas:
            for victim in options.victim:
                refuse_strangers(options.shared)
                outcomes += _measure(victim, replicas, options)
    print(markdown(_HEAD, map(_row, outcomes)))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0 if all(outcome.clean for outcome in outcomes) else 1


def _measure(victim: str, replicas: int, options: argparse.Namespace) -> list[Outcome]:
    """One life of `penstock serve` with some kills."""

    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        more = [] if options.gang else ["--replicas", str(replicas)]
        words = penstock_serve(workload, port, folder)
        if options.processes > 1:
            _with_processes(folder / "bench.yaml", replicas, port, options.processes)
            return [*words[: words.index("--port")]]
        return [*words, *more]

    say(f"replicas: {replicas}; hit: {victim}")
    model = shelf.made("moe") if options.gang else options.model
    together = {"data_parallel_size": replicas, "enable_expert_parallel": True} if options.gang else {}
    workload = Workload(model, options.executor, options.tokens, together)
    outcomes: list[Outcome] = []
    running = Running.start(Contestant("penstock", "penstock serve", command), workload)
    rotation = Rotation(running.port)
    try:
        say(f"    first token after {running.first_token(workload):.1f} s")
        for _ in range(options.kills):
            if rotation.first((replicas,), time.monotonic(), _BACK_LIMIT_S) is None:
                raise DidNotStart(f"It has not {replicas} replicas in rotation.")
            outcomes.append(_kill_under_load(Outcome(victim, replicas), running, rotation, workload, options))
            say(f"    {outcomes[-1]}")
    except (DidNotStart, RuntimeError) as error:
        outcomes.append(Outcome(victim, replicas, problem=f"{error} See {running.log}"))
    finally:
        rotation.end()
        stopped = running.stop()
    if not outcomes[-1].problem:
        running.forget()
    return [*outcomes[:-1], replace(outcomes[-1], left_over=stopped.left_over)]


def _with_processes(config: Path, replicas: int, port: int, count: int) -> None:
    """Makes an application of a model's config: one that shares its port among gateways."""
    model: dict[str, Any] = yaml.safe_load(config.read_text())
    model["deployment_config"] = {"num_replicas": replicas}
    args = {"llm_configs": [model], "gateway": {"port": port, "processes": count}}
    builder = "penstock.serve.builders:build_openai_app"
    application = {"name": "bench", "import_path": builder, "args": args}
    config.write_text(yaml.safe_dump({"applications": [application]}))


def _kill_under_load(
    outcome: Outcome,
    running: Running,
    rotation: Rotation,
    workload: Workload,
    options: argparse.Namespace,
) -> Outcome:
    load = Generator(running.port, workload, streams=options.streams, warmup_s=0.0, seconds=_LOAD_LIMIT_S)
    time.sleep(_UNDISTURBED_S)
    hit = VICTIMS[outcome.victim]
    victim = _find(running.processes(), hit.title)
    engines = _engines(victim) if hit.is_replica else []
    moved, killed_at = _moved(running.port), time.monotonic()
    victim.send_signal(hit.signal)
    if hit.takes_requests and not (outcome.victim == "gateway" and options.processes > 1):
        without = range(1 if options.gang or not hit.is_replica else outcome.replicas)
        out_at = rotation.first(without, killed_at, _OUT_LIMIT_S)
        back_at = rotation.first((outcome.replicas,), out_at, _BACK_LIMIT_S) if out_at else None
    else:
        out_at, back_at = killed_at, _successor(running, hit.title, victim.pid)
    engines_left = len(processes.wait_ended(engines, 0.0))
    time.sleep(_AFTERWARDS_S)
    load.stop()
    seen = load.result()
    return replace(
        outcome,
        good=seen.figures["requests_all"],
        failures=seen.failures,
        statuses=seen.figures["statuses"],
        moved=_moved(running.port) - (moved if outcome.victim != "gateway" else 0),
        longest_silence_s=seen.figures["longest_silence_s"],
        out_after_s=out_at and out_at - killed_at,
        back_after_s=back_at and back_at - killed_at,
        engines_left=engines_left,
    )


def _engines(victim: psutil.Process) -> list[psutil.Process]:
    """The engine's processes of the replica that `victim` is, or belongs to."""
    replica = victim if VICTIMS["replica"].title.search(processes.title(victim)) else victim.parents()[0]
    return [p for p in processes.descendants(replica) if processes.kind_of(processes.title(p)) == "engine"]


def _successor(running: Running, title: re.Pattern[str], pid: int) -> float | None:
    """When another process with such a title than `pid` was first seen."""
    deadline = time.monotonic() + _BACK_LIMIT_S
    while time.monotonic() < deadline:
        if any(p.pid != pid and title.search(processes.title(p)) for p in running.processes()):
            return time.monotonic()
        time.sleep(_LOOK_S)
    return None


def _find(candidates: list[psutil.Process], pattern: re.Pattern[str]) -> psutil.Process:
    for process in candidates:
        if pattern.search(processes.title(process)):
            return process
    raise RuntimeError(f"No process matches {pattern.pattern}.")


_HEAD = [
    *("hit", "replicas", "good", "failed", "moved", "out after s", "back after s"),
    *("longest silence s", "engines left", "left over", "problem"),
]


def _row(outcome: Outcome) -> Row:
    kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.failures.items())
    out, back = outcome.out_after_s, outcome.back_after_s
    return [
        *(outcome.victim, str(outcome.replicas), str(outcome.good)),
        f"{sum(outcome.failures.values())}" + (f" ({kinds})" if kinds else ""),
        str(outcome.moved),
        *("never" if out is None else f"{out:.2f}", "never" if back is None else f"{back:.1f}"),
        f"{outcome.longest_silence_s:.2f}",
        *(str(outcome.engines_left), str(len(outcome.left_over)), outcome.problem),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.failures", description=_FIRST_LINE)
    add = parser.add_argument
    add("--victim", type=choices(list(VICTIMS)), default=list(VICTIMS), help=", ".join(VICTIMS))
    add("--replicas", type=numbers, default=[1, 2], metavar="N,N", help="replicas to run with")
    add("--kills", type=int, default=3, help="kills in each life of penstock serve")
    add("--streams", type=int, default=16, help="concurrent requests")
    add("--gang", action="store_true", help="replicas that compute together, of a model with experts")
    add("--processes", type=int, default=1, help="gateways on one port; one of them is hit")
    add("--executor", choices=EXECUTORS, default="uni", help="vLLM's executor")
    add_common(parser)
    # Long answers: nearly every stream is in the middle of one when it is hit.
    parser.set_defaults(tokens=256)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
