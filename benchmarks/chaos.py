"""Every process of a service killed and stopped for good, under load, with a ledger of every request.

    python -m benchmarks.chaos [--engine sim|vllm] [--fault "kill gateway,..."] [--kills 5] [--json FILE]

One `penstock serve` with two replicas and two gateways; streams, unary requests and batches through the
Batches API run all the time. A fault hits one process by SIGKILL, or by SIGSTOP "for good": it is continued
only when the service has not helped itself in time. "Whole again" is when all processes are there, none of
them stopped, and every gateway counts all replicas. A fault that ends the command has a service of its own.

The last column compares with docs/operate/failures.md: what fails that should not, and what is noticed late.
Exit code 1 when there is such a thing, or a request without an outcome, or a row that did not come once.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import psutil
import yaml

from benchmarks import processes
from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Contestant, DidNotStart, Running
from benchmarks.ledger import Batches, Clients
from benchmarks.table import Row, markdown
from benchmarks.workload import MODEL_ID, Workload

_TITLES = {
    "engine": re.compile(r"VLLM::EngineCore|penstock\.engines\.vllm\.core"),
    "replica": re.compile(r"ray::ServeReplica:.*:LLMServer"),
    "gateway": re.compile(r"ray::ServeReplica:.*:LLMRouter"),
    "control": re.compile(r"ray::ServeReplica:.*:LLMControl"),
    "jobs": re.compile(r"ray::ServeReplica:.*:LLMJobs"),
    "controller": re.compile(r"ray::ServeController"),
    "raylet": re.compile(r"/raylet "),
    "gcs": re.compile(r"/gcs_server "),
}
_ACCEPTED = ("stream: cut", "unary: cut")


@dataclass(frozen=True, slots=True)
class Promise:
    """What docs/operate/failures.md allows. slowest_s: a good unary request, with room for a full machine.

    heals: whether the service helps itself. ends: whether the command ends.
    """

    fails: tuple[str, ...] = ()
    slowest_s: float = 4.0
    heals: bool = True
    ends: bool = False


FAULTS = {
    "kill engine": Promise(),
    "stop engine": Promise(slowest_s=8.0),
    "kill replica": Promise(),
    "stop replica": Promise(slowest_s=9.0),
    "kill gateway": Promise(_ACCEPTED),
    "stop gateway": Promise(_ACCEPTED),
    "kill control": Promise(),
    "stop control": Promise(),
    "kill jobs": Promise(),
    "stop jobs": Promise(),
    "kill controller": Promise(),
    "stop controller": Promise(heals=False),
    "kill raylet": Promise(ends=True),
    "kill gcs": Promise(ends=True),
    "stop raylet": Promise(heals=False),
    "stop gcs": Promise(heals=False),
}
_WHOLE_LIMIT_S, _AFTERWARDS_S, _START_S, _STOP_S = 90.0, 3.0, 240.0, 400.0
_END_LIMIT_S = 60.0
_LOOK_S = 0.05
_IN_ROW = 4  # healthy answers on new connections: they reach both gateways


@dataclass(slots=True)
class Outcome:
    """One fault, `n` times. whole_s: seconds until whole again, or until the command had ended.

    late: what is not as the docs say.
    """

    fault: str
    n: int = 0
    whole_s: list[float] = field(default_factory=list[float])
    silence_s: float = 0.0
    slowest_s: float = 0.0
    failed: Counter[str] = field(default_factory=Counter[str])
    late: Counter[str] = field(default_factory=Counter[str])


class Service:
    """One life of `penstock serve` with its clients."""

    def __init__(self, options: argparse.Namespace) -> None:
        repeats = options.engine == "sim"
        self._workload = Workload(options.model, "uni", options.tokens)
        self._engine = options.engine
        self.running = Running.start(Contestant("penstock", "penstock serve", self._command), self._workload)
        self.running.first_token(self._workload)
        self._batches = Batches(self.running.port, rows=options.rows, repeats=repeats)
        self._clients = Clients(
            self.running.port,
            streams=options.streams,
            unary=options.unary,
            tokens=options.tokens,
            repeats=repeats,
        )
        self.ledger = self._clients.ledger
        self._wanted = Counter({"replica": 2, "gateway": 2, "control": 1, "jobs": 1, "controller": 1})
        if not repeats:
            self._wanted["engine"] = 2
        if self.whole_after(time.monotonic(), _START_S) is None:
            raise DidNotStart(
                f"The service is not whole; it has {self._living()}. {self.running.last_words()}"
            )

    def _command(self, workload: Workload, port: int, folder: Path) -> list[str]:
        model = {
            "model_loading_config": {"model_id": MODEL_ID, "model_source": str(workload.model)},
            "deployment_config": {"num_replicas": 2},
        }
        if self._engine == "sim":
            model |= {"llm_engine": "sim", "engine_kwargs": {"step_base_ms": 30}}
        else:
            model |= {"accelerator_config": {"kind": "cpu"}, "engine_kwargs": workload.engine_kwargs()}
        config = {
            "llm_configs": [model],
            "gateway": {"processes": 2},
            "jobs": {"storage": str(folder / "jobs")},
        }
        file = folder / "bench.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [sys.executable, "-c", "from penstock.cli import main; main()"]
        return [*command, "serve", str(file), "--port", str(port)]

    def find(self, kind: str) -> psutil.Process:
        """Raises: RuntimeError when there is none."""
        for process in self.running.processes():
            if _TITLES[kind].search(processes.title(process)):
                return process
        raise RuntimeError(f"There is no process of {kind}.")

    def whole_after(self, since: float, limit_s: float) -> float | None:
        """Seconds until all processes and replicas are there; None when the limit is over."""
        in_row, first_at = 0, 0.0
        while (now := time.monotonic()) < since + limit_s:
            is_whole = self._living() >= self._wanted and self._is_healthy()
            in_row = in_row + 1 if is_whole else 0
            if in_row == 1:
                first_at = now
            if in_row == _IN_ROW:
                return first_at - since
            time.sleep(_LOOK_S)
        return None

    def _living(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for process in self.running.processes():
            with contextlib.suppress(psutil.Error):
                title = processes.title(process)
                kind = next((kind for kind, pattern in _TITLES.items() if pattern.search(title)), "")
                found[kind] += process.status() != psutil.STATUS_STOPPED
        return found

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
            connection = http.client.HTTPConnection("127.0.0.1", self.running.port, timeout=2)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                counts = json.loads(connection.getresponse().read())["models"][MODEL_ID]
                return counts["ready"] == counts["replicas"] == self._wanted["replica"]
        return False

    def end(self, *, has_ended: bool) -> list[str]:
        """What is wrong with the ledger, the rows, or what the command left."""
        wrong = [] if has_ended else [self._batches.stop()]
        wrong.append(self._clients.stop())
        say(f"    {self.ledger.total} requests, {self._batches.done} batches")
        if not has_ended and not self._batches.done:
            wrong.append("no batch was completed")
        if left := self.running.stop().left_over:
            wrong.append(f"left over: {', '.join(left)}")
        found = [one for one in wrong if one]
        if not found:
            self.running.forget()
        return found


def main() -> int:
    """Exit code 1 when something is not as the docs say."""
    options = _options()
    refuse_strangers(options.shared)
    endless = [fault for fault in options.fault if not FAULTS[fault].ends]
    ending = [fault for fault in options.fault if FAULTS[fault].ends]
    limit_s = (1 + len(ending)) * (_START_S + _STOP_S) + len(endless) * options.kills * (
        2 * _WHOLE_LIMIT_S + _AFTERWARDS_S
    )
    say(f"It ends within {limit_s / 60:.0f} minutes, whatever happens.")
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    with cleaned_up():
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
        signal.alarm(int(limit_s))
        if endless:
            wrong += _life(endless, options, outcomes)
        for fault in ending:
            wrong += _life([fault], options, outcomes)
    print(markdown(_HEAD, map(_row, outcomes)))
    print(*(f"\n{one}" for one in wrong), sep="")
    if options.json:
        faults = [{one.name: getattr(outcome, one.name) for one in fields(outcome)} for outcome in outcomes]
        found = {"faults": faults, "wrong": wrong}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong or any(outcome.late for outcome in outcomes) else 0


def _life(faults: list[str], options: argparse.Namespace, outcomes: list[Outcome]) -> list[str]:
    """Adds an outcome for each fault; returns what is wrong with the ledger."""
    try:
        service = Service(options)
    except DidNotStart as error:
        return [str(error)]
    ends = any(FAULTS[fault].ends for fault in faults)
    try:
        for fault in faults:
            outcomes.append(Outcome(fault))
            for _ in range(1 if ends else options.kills):
                (_end if ends else _hit)(outcomes[-1], service)
                say(f"    {outcomes[-1]}")
    except RuntimeError as error:
        return [str(error), *service.end(has_ended=ends)]
    return service.end(has_ended=ends)


def _hit(outcome: Outcome, service: Service) -> None:
    """One fault of a service that goes on."""
    promise, ledger = FAULTS[outcome.fault], service.ledger
    ledger.mark()
    with _struck(outcome.fault, service) as at:
        whole_s = service.whole_after(at, _WHOLE_LIMIT_S)
    if whole_s is None:
        if promise.heals:
            outcome.late[f"not whole after {_WHOLE_LIMIT_S:g} s"] += 1
        if service.whole_after(at, 2 * _WHOLE_LIMIT_S) is None:
            raise RuntimeError(f"The service is not whole again after: {outcome.fault}.")
    else:
        outcome.whole_s.append(whole_s)
    time.sleep(_AFTERWARDS_S)
    _note(outcome, service)
    if ledger.slowest_s > promise.slowest_s:
        outcome.late[f"unary over {promise.slowest_s:g} s"] += 1
    for kind, count in ledger.failed.items():
        if kind not in promise.fails:
            outcome.late[kind] += count


def _end(outcome: Outcome, service: Service) -> None:
    """A fault that ends the command."""
    service.ledger.mark()
    with _struck(outcome.fault, service) as at:
        code = service.running.wait(_END_LIMIT_S)
        if code is None:
            outcome.late[f"the command runs after {_END_LIMIT_S:g} s"] += 1
        else:
            outcome.whole_s.append(time.monotonic() - at)
    _note(outcome, service)


def _note(outcome: Outcome, service: Service) -> None:
    ledger = service.ledger
    outcome.n += 1
    silence_s = max(ledger.silence_s, time.monotonic() - ledger.heard_at)
    outcome.silence_s = max(outcome.silence_s, silence_s)
    outcome.slowest_s = max(outcome.slowest_s, ledger.slowest_s)
    outcome.failed.update(ledger.failed)


@contextmanager
def _struck(fault: str, service: Service) -> Generator[float]:
    """The moment of the fault. Who was stopped runs again afterwards, where nothing replaces it."""
    how, kind = fault.split()
    victim = service.find(kind)
    victim.send_signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        if not FAULTS[fault].heals:
            victim.send_signal(signal.SIGCONT)


_HEAD = [
    *(
        "fault",
        "n",
        "whole again, or ended: p50, max s",
        "longest silence s",
        "slowest good unary s",
        "failed",
    ),
    "not as the docs say",
]


def _row(outcome: Outcome) -> Row:
    times = outcome.whole_s
    return [
        *(outcome.fault, str(outcome.n)),
        f"{statistics.median(times):.1f}, {max(times):.1f}" if times else "never",
        *(f"{outcome.silence_s:.2f}", f"{outcome.slowest_s:.1f}"),
        *(_counts(outcome.failed), _counts(outcome.late)),
    ]


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counter.items()) or "nothing"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=_FIRST_LINE)
    add = parser.add_argument
    add("--engine", choices=("sim", "vllm"), default="sim", help="the simulator, or vLLM on CPU")
    add("--fault", type=choices(list(FAULTS)), default=None, help=", ".join(FAULTS))
    add("--kills", type=int, default=5, help="times of each fault that does not end the command")
    add("--streams", type=int, default=8, help="concurrent streams")
    add("--unary", type=float, default=4.0, help="other requests a second")
    add("--rows", type=int, default=300, help="of each batch")
    add_common(parser)
    options = parser.parse_args()
    if options.fault is None:
        options.fault = [fault for fault in FAULTS if options.engine == "vllm" or "engine" not in fault]
    return options


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
