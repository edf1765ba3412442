"""What a service takes that has nothing to do: CPU and wake-ups of each of its processes.

    python -m benchmarks.idle [--only penstock,vllm] [--seconds 60] [--threads] [--json FILE]

Each is started, asked for one answer, and left alone. A wake-up is a voluntary context switch: what waits for
events alone has none. CPU is the kernel's own count in nanoseconds (`schedstat`), of all threads that live at
the end. On a busy machine the seconds stay nearly what they are: caches are colder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import CONTESTANTS, Contestant, Running
from benchmarks.processes import title
from benchmarks.table import markdown
from benchmarks.workload import Workload

_NAMES = (
    (r"ray::ServeReplica:\w+:(\S+)", r"\1"),
    (r"ray::(\w+)", r"\1"),
    (r"/(gcs_server|raylet) ", r"\1"),
    (r"ray/\S*?(\w+/\w+)\.py", r"\1.py"),
    (r"penstock\.engines\.vllm\.core|VLLM::\w+|multiprocessing\.spawn", "engine core"),
    (r"vllm\.entrypoints\.openai\.api_server", "API server"),
    (r"penstock\.cli", "the command"),
    (r"resource_tracker", "Python's resource tracker"),
)
_SWITCHES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)

Thread = tuple[int, int, str]
"""Process, thread, the thread's name."""

Spent = Mapping[Thread, tuple[int, int]]
"""So far: ns of CPU, voluntary context switches."""


@dataclass(frozen=True, slots=True)
class Line:
    """A process, or a thread. Units: percent of a core; a second."""

    service: str
    name: str
    percent: float
    wakeups: float


def main() -> int:
    options = _options()
    lines: list[Line] = []
    with cleaned_up():
        refuse_strangers(options.shared)
        for contestant in (one for one in CONTESTANTS if one.name in options.only):
            lines += _measure(contestant, Workload(options.model, "uni", options.tokens), options)
    head = ["idle", "CPU, % of a core", "wake-ups a second"]
    print(markdown(head, [[line.name, f"{line.percent:.2f}", f"{line.wakeups:.1f}"] for line in lines]))
    if options.json:
        options.json.write_text(json.dumps([asdict(line) for line in lines]) + "\n")
    return 0


def _measure(contestant: Contestant, workload: Workload, options: argparse.Namespace) -> list[Line]:
    running = Running.start(contestant, workload)
    try:
        say(f"{contestant.title}: first token after {running.first_token(workload):.1f} s")
        time.sleep(options.settle)
        before, began = _spent(running.processes()), time.monotonic()
        time.sleep(options.seconds)
        after, took_s = _spent(running.processes()), time.monotonic() - began
        return _lines(contestant.title, before, after, took_s, options.threads)
    finally:
        running.stop()
        running.forget()


def _spent(family: Sequence[psutil.Process]) -> Spent:
    found: dict[Thread, tuple[int, int]] = {}
    for process in family:
        for task in Path(f"/proc/{process.pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                cpu_ns = int((task / "schedstat").read_text().split()[0])
                switches = _SWITCHES.search((task / "status").read_text())
                thread = process.pid, int(task.name), (task / "comm").read_text().strip()
                found[thread] = cpu_ns, int(switches[1]) if switches else 0
    return found


def _lines(service: str, before: Spent, after: Spent, took_s: float, by_thread: bool) -> list[Line]:
    """All processes together, then each, the busiest first."""
    cpu_ns, switches = Counter[str](), Counter[str]()
    for thread, now in after.items():
        pid, _, name = thread
        label = f"{_name(pid)}: {name}" if by_thread else _name(pid)
        earlier = before.get(thread, (0, 0))
        cpu_ns[label] += now[0] - earlier[0]
        switches[label] += now[1] - earlier[1]
    rows = [(service, cpu_ns.total(), switches.total())]
    rows += [(name, spent, switches[name]) for name, spent in cpu_ns.most_common()]
    return [Line(service, name, spent / 1e7 / took_s, woken / took_s) for name, spent, woken in rows]


def _name(pid: int) -> str:
    text = title(psutil.Process(pid)) if psutil.pid_exists(pid) else ""
    for pattern, name in _NAMES:
        if found := re.search(pattern, text):
            return found.expand(name)
    return text[:40] or "ended"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.idle", description=_FIRST_LINE)
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--only", type=choices(names), default=["vllm", "penstock"], metavar="NAME,NAME")
    parser.add_argument("--settle", type=float, default=90.0, help="seconds from the first token on")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is looked at")
    parser.add_argument("--threads", action="store_true", help="a line for each name of a thread")
    add_common(parser)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
