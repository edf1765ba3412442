"""How long until the first token: of a cold start, of a model that sleeps, of one whose turn it is not.

    python -m benchmarks.waking [--rounds 5] [--json FILE]

"cold": of `penstock serve` with one model, from its start. Then it runs two that take turns on the same
memory. "wake": a request for one while both sleep; "switch": a request for the one that sleeps while the
other is awake.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from benchmarks.command import add_common, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Contestant, Running, penstock_serve
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID, Workload

OTHER_ID = f"{MODEL_ID}-other"
_KEY = "bench"
_LIMIT_S = 300.0
_SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Times:
    """Units: seconds; MiB of proportional set size of all processes."""

    cold_s: float
    wake_s: tuple[float, ...] = ()
    switch_s: tuple[float, ...] = ()
    awake_mib: float = 0.0
    asleep_mib: float = 0.0


def main() -> int:
    options = _options()
    with cleaned_up():
        refuse_strangers(options.shared)
        times = _measure(Workload(options.model, "uni", options.tokens), options.rounds)
    rows = [
        ["cold start of `penstock serve`", f"{times.cold_s:.1f}", "1"],
        ["wake", f"{median(times.wake_s):.1f}", _spread(times.wake_s)],
        ["switch", f"{median(times.switch_s):.1f}", _spread(times.switch_s)],
    ]
    print(markdown(["until the first token", "median s", "runs"], rows))
    print(f"\nMemory of all processes: {times.awake_mib:.0f} MiB, both asleep {times.asleep_mib:.0f} MiB.")
    if options.json:
        options.json.write_text(json.dumps({name: getattr(times, name) for name in Times.__slots__}) + "\n")
    return 0


def _measure(workload: Workload, rounds: int) -> Times:
    times = Times(_cold_s(workload))
    contestant = Contestant(
        "penstock", "penstock serve", _command, environment=lambda _: {"PENSTOCK_ADMIN_KEY": _KEY}
    )
    running = Running.start(contestant, workload)
    try:
        running.first_token(workload)
        first_token(running.port, OTHER_ID)  # the first turn of an engine is a start
        first_token(running.port, MODEL_ID)
        times = replace(times, awake_mib=_memory_mib(running))
        say(f"    cold {times.cold_s:.1f} s, {times.awake_mib:.0f} MiB")
        for _ in range(rounds):
            switch_s = first_token(running.port, OTHER_ID)
            _post(running.port, "sleep", OTHER_ID)
            times = replace(times, asleep_mib=_memory_mib(running))
            wake_s = first_token(running.port, MODEL_ID)
            say(f"    switch {switch_s:.1f} s, wake {wake_s:.1f} s")
            times = replace(times, wake_s=(*times.wake_s, wake_s), switch_s=(*times.switch_s, switch_s))
        return times
    finally:
        running.stop()
        running.forget()


def _cold_s(workload: Workload) -> float:
    running = Running.start(Contestant("penstock", "penstock serve", penstock_serve), workload)
    try:
        return running.first_token(workload)
    finally:
        running.stop()
        running.forget()


def _command(workload: Workload, port: int, folder: Path) -> list[str]:
    command = penstock_serve(workload, port, folder)
    config = folder / "bench.yaml"
    one: dict[str, Any] = yaml.safe_load(config.read_text()) | {"on_demand": {"min_awake_s": 0}}
    other = one | {"model_loading_config": one["model_loading_config"] | {"model_id": OTHER_ID}}
    config.write_text(yaml.safe_dump({"llm_configs": [one, other]}))
    return command


def first_token(port: int, model: str) -> float:
    """Seconds until a stream's first byte; the answer is read to its end."""
    time.sleep(_SETTLE_S)
    body = json.dumps({"model": model, "prompt": "water", "max_tokens": 4, "stream": True})
    began = time.monotonic()
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        first = answer.read(1)
        took_s = time.monotonic() - began
        rest = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"The request for {model} failed: {(first + rest)[:500]!r}")
    return took_s


def _post(port: int, operation: str, model: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)) as connection:
        headers = {"authorization": f"Bearer {_KEY}"}
        connection.request("POST", f"/admin/{operation}", json.dumps({"model": model}), headers)
        answer = connection.getresponse()
        said = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{operation} failed: {said[:500]!r}")


def _memory_mib(running: Running) -> float:
    return sum(_pss(process) for process in running.processes()) / 2**20


def _pss(process: psutil.Process) -> int:
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def _spread(seconds: tuple[float, ...]) -> str:
    return f"{len(seconds)} ({min(seconds):.1f} to {max(seconds):.1f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waking", description=_FIRST_LINE)
    parser.add_argument("--rounds", type=int, default=5, help="sleeps and wakes")
    add_common(parser)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
