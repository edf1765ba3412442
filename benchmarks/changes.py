"""What users notice while a fleet is changed under load: requests lost, streams broken, silence.

    python -m benchmarks.changes [--change update,single,surge,fewer,load,zero,move] [--streams 16]

"update": `serve.run` with another engine argument, two replicas. "single": the same with one replica;
"surge": with one, and `max_surge_percent` 100. "fewer": `serve.run` with one replica instead of two. "load":
a burst has autoscaling start a second replica, its end has it stopped. "zero": a request that has the only
one started. "move": two simulated replicas are replaced by two that give the same answers, under 64 streams
of 2,000 tokens, which take some 20 s each: they go on at the new ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import free_port
from benchmarks.failures import Rotation
from benchmarks.load import Generator, Load
from benchmarks.table import Row, markdown
from benchmarks.waking import first_token
from benchmarks.workload import MODEL_ID, Workload

_APP = "changes"
_BEFORE_S, _AFTER_S = 5.0, 5.0
_LIMIT_S = 600.0
_LOST = ("refused", "closed", "status")
_SOON = {"upscale_delay_s": 2.0, "downscale_delay_s": 5.0, "downscale_to_zero_delay_s": 5.0}
_QUIET_STREAMS, _BURST_STREAMS, _TARGET = 2, 48, 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """One change. lost: requests that failed before their first byte; broken: after it. Units: seconds."""

    change: str
    took_s: float
    good: int = 0
    lost: int = 0
    broken: int = 0
    longest_silence_s: float = 0.0
    more: str = ""

    @classmethod
    def of(cls, change: str, took_s: float, *loads: Load, more: str = "") -> Outcome:
        failures = [load.failures for load in loads]
        lost = sum(count for one in failures for kind, count in one.items() if kind in _LOST)
        return cls(
            change,
            took_s,
            good=sum(load.figures["requests_all"] for load in loads),
            lost=lost,
            broken=sum(sum(one.values()) for one in failures) - lost,
            longest_silence_s=loads[0].figures["longest_silence_s"],
            more=more,
        )


class Fleet:
    """Penstock in a Ray of our own, deployed as a user's program would deploy it."""

    def __init__(self, workload: Workload, streams: int, port: int) -> None:
        self.port = port
        self.streams = streams
        self._workload = workload

    def deploy(self, deployment: dict[str, Any], **engine: Any) -> float:
        """Seconds until Serve says that it is as it shall be."""
        return self._run(
            {
                "model_loading_config": {"model_id": MODEL_ID, "model_source": str(self._workload.model)},
                "accelerator_config": {"kind": "cpu"},
                "engine_kwargs": {**self._workload.engine_kwargs(), **engine},
                "deployment_config": deployment,
            }
        )

    def simulate(self, **more: Any) -> float:
        """The same with two simulated replicas. more: of the model's config."""
        engine = {"step_base_ms": 10, "step_per_request_ms": 0, "max_model_len": 8192}
        model = {"model_loading_config": {"model_id": MODEL_ID}, "llm_engine": "sim", "engine_kwargs": engine}
        return self._run({**model, "deployment_config": _TWO, **more})

    def _run(self, model: dict[str, Any]) -> float:
        from ray import serve

        from penstock.serve import build_openai_app

        began = time.monotonic()
        serve.run(build_openai_app({"llm_configs": [model], "gateway": {"port": self.port}}), name=_APP)
        return time.monotonic() - began

    def load(self, streams: int | None = None, tokens: int | None = None) -> Generator:
        """Until it is stopped."""
        workload = replace(self._workload, tokens=tokens or self._workload.tokens)
        return Generator(
            self.port, workload, streams=streams or self.streams, warmup_s=0, seconds=2 * _LIMIT_S
        )

    @contextmanager
    def rotation(self) -> Iterator[Rotation]:
        rotation = Rotation(self.port)
        try:
            yield rotation
        finally:
            rotation.end()


def _redeployed(
    change: str, before: dict[str, Any], after: dict[str, Any], **engine: Any
) -> Callable[[Fleet], Outcome]:
    def measured(fleet: Fleet) -> Outcome:
        fleet.deploy(before)
        load = fleet.load()
        time.sleep(_BEFORE_S)
        took_s = fleet.deploy(after, **engine)
        time.sleep(_AFTER_S)
        return Outcome.of(change, took_s, _ended(load))

    return measured


def _with_load(fleet: Fleet) -> Outcome:
    """From one replica to two and back; a few streams ask all the time."""
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": _TARGET, **_SOON}
    fleet.deploy({"autoscaling_config": scaling})
    with fleet.rotation() as rotation:
        quiet = fleet.load(_QUIET_STREAMS)
        time.sleep(_BEFORE_S)
        began, burst = time.monotonic(), fleet.load(_BURST_STREAMS)
        more_s = _reached(rotation, 2, began)
        time.sleep(_AFTER_S)
        bursted, ended = _ended(burst), time.monotonic()
        fewer_s = _reached(rotation, 1, ended)
        time.sleep(_AFTER_S)
    more = f"1 to 2 after {more_s:.1f} s, 2 to 1 after {fewer_s:.1f} s"
    return Outcome.of("load", more_s + fewer_s, _ended(quiet), bursted, more=more)


def _moved(fleet: Fleet) -> Outcome:
    start_s = fleet.simulate()
    load = fleet.load(64, 2000)
    time.sleep(_BEFORE_S)
    took_s = fleet.simulate(slo={"ttft_ms": 60_000})  # answers do not depend on it
    time.sleep(_AFTER_S)
    figures = httpx.get(f"http://127.0.0.1:{fleet.port}/metrics").text
    went_on = sum(float(n) for n in re.findall(r"^penstock_streams_continued_total.* (\S+)$", figures, re.M))
    ended = _ended(load)
    most_s = ended.figures["itl_ms"]["max"] / 1000
    more = (
        f"first start {start_s:.1f} s; {went_on:.0f} streams went on, the longest pause of one {most_s:.1f} s"
    )
    return Outcome.of("move", took_s, ended, more=more)


def _from_zero(fleet: Fleet) -> Outcome:
    fleet.deploy({"autoscaling_config": {"min_replicas": 0, "max_replicas": 1, **_SOON}})
    with fleet.rotation() as rotation:
        _reached(rotation, 0, time.monotonic())
    took_s = first_token(fleet.port, MODEL_ID)
    return Outcome("zero", took_s, good=1, longest_silence_s=took_s)


def _reached(rotation: Rotation, replicas: int, since: float) -> float:
    """Seconds until so many were in the gateway's rotation."""
    at = rotation.first((replicas,), since, _LIMIT_S)
    if at is None:
        raise RuntimeError(f"There were not {replicas} replicas within {_LIMIT_S:g} s.")
    return at - since


def _ended(load: Generator) -> Load:
    load.stop()
    return load.result()


_ONE, _TWO, _SURGE = {"num_replicas": 1}, {"num_replicas": 2}, {"num_replicas": 1, "max_surge_percent": 100}
_OTHER = {"max_num_seqs": 128}
CHANGES: dict[str, Callable[[Fleet], Outcome]] = {
    "update": _redeployed("update", _TWO, _TWO, **_OTHER),
    "single": _redeployed("single", _ONE, _ONE, **_OTHER),
    "surge": _redeployed("surge", _SURGE, _SURGE, **_OTHER),
    "fewer": _redeployed("fewer", _TWO, _ONE),
    "load": _with_load,
    "zero": _from_zero,
    "move": _moved,
}


def main() -> int:
    """Exit code 1 when a request was lost, or a stream broken."""
    options = _options()
    outcomes: list[Outcome] = []
    with cleaned_up():
        refuse_strangers(options.shared)
        with _fleet(Workload(options.model, "uni", options.tokens), options.streams) as fleet:
            for name in options.change:
                say(name)
                outcomes.append(CHANGES[name](fleet))
                say(f"    {outcomes[-1]}")
    print(markdown(_HEAD, map(_row, outcomes)))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 1 if any(outcome.lost or outcome.broken for outcome in outcomes) else 0


@contextmanager
def _fleet(workload: Workload, streams: int) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as folder:  # Ray's socket paths are short
        os.environ.update(workload.environment(Path(folder)))
        import ray
        from ray import serve

        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20
        )
        serve.start(proxy_location="Disabled")
        try:
            yield Fleet(workload, streams, free_port())
        finally:
            serve.shutdown()
            ray.shutdown()


_HEAD = ("change", "took s", "good", "lost", "broken", "longest silence s", "")


def _row(outcome: Outcome) -> Row:
    return (
        outcome.change,
        f"{outcome.took_s:.1f}",
        *map(str, (outcome.good, outcome.lost, outcome.broken)),
        f"{outcome.longest_silence_s:.2f}",
        outcome.more,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.changes", description=_FIRST_LINE)
    add = parser.add_argument
    add("--change", type=choices(list(CHANGES)), default=list(CHANGES), help=", ".join(CHANGES))
    add("--streams", type=int, default=16, help="concurrent requests")
    add_common(parser)
    # Long answers: nearly every stream is in the middle of one when its replica, or gateway, is stopped.
    parser.set_defaults(tokens=256)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
