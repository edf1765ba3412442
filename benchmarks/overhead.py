"""What a row costs beside its engine: rows per second and memory, where the engine answers at once.

`python -m benchmarks.overhead --rows 20000 --large 1000000`: a pipeline on Ray Data, `penstock batch` with an
engine of its own and with one on Ray, and a large job, all of short rows on a simulated engine without step
times. Memory is the proportional share (PSS) of all processes at its highest, looked at twice a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.command import cleaned_up, say
from benchmarks.processes import descendants, memory_mib
from benchmarks.record import machine
from benchmarks.table import markdown

FREE = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": 1e12}
_LOOK_S = 0.5


@dataclass(slots=True)
class Peak:
    """The most memory seen so far, in MiB, of our descendants and, with `own`, of ourselves."""

    own: bool
    mib: float = 0.0

    def look(self, ended: threading.Event) -> None:
        while not ended.wait(_LOOK_S):
            ours = [psutil.Process()] if self.own else []
            self.mib = max(self.mib, memory_mib([*ours, *descendants()]))


@contextmanager
def watched(own: bool) -> Iterator[Peak]:
    peak, ended = Peak(own), threading.Event()
    looking = threading.Thread(target=peak.look, args=(ended,))
    looking.start()
    try:
        yield peak
    finally:
        ended.set()
        looking.join()


def command(rows: int, *words: str) -> tuple[float, float]:
    """Rows per second and MiB of one `penstock batch`."""
    with tempfile.TemporaryDirectory() as folder, watched(own=False) as peak:
        given, told = Path(folder) / "in.jsonl", Path(folder) / "report.json"
        with given.open("w") as file:
            file.writelines(f'{{"id": {n}, "prompt": "row {n}"}}\n' for n in range(rows))
        engine = [
            word for name, value in FREE.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        batch = [sys.executable, "-m", "penstock.cli", "batch", str(given), "-o", f"{folder}/out.jsonl"]
        done = [*batch, "--engine", "sim", *engine, "--report", str(told), *words]
        subprocess.run(done, check=True, capture_output=True)
        report = json.loads(told.read_text())
    assert report["ok"] == rows, report
    return report["run_rows_per_s"], peak.mib


def pipeline(rows: int) -> tuple[float, float]:
    """The same of a processor, from the first row's begin to the last one's end."""
    import ray

    from penstock.data import EngineProcessorConfig, LLMConfig, build_processor

    def stamped(row: dict[str, Any]) -> dict[str, Any]:
        now = time.time()
        return {"begin": now - row["time_taken_llm"], "end": now}

    model = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim", engine_kwargs=FREE)
    processor = build_processor(
        EngineProcessorConfig(llm_config=model),
        preprocess=lambda row: {"prompt": f"row {row['id']}"},
        postprocess=stamped,
    )
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        with watched(own=True) as peak:
            ended = processor(ray.data.range(rows)).take_all()
    finally:
        ray.shutdown()
    took = max(row["end"] for row in ended) - min(row["begin"] for row in ended)
    return len(ended) / took, peak.mib


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--large", type=int, default=1_000_000)
    options = parser.parse_args()
    lines: list[tuple[str, ...]] = []
    with cleaned_up():
        for name, rows, run in (
            ("pipeline", options.rows, pipeline),
            ("`penstock batch`", options.rows, command),
            ("`penstock batch --replicas 2`", options.rows, lambda n: command(n, "--replicas", "2")),
            ("`penstock batch`", options.large, command),
        ):
            rate, mib = run(rows)
            lines.append((name, f"{rows:,}", f"{rate:,.0f}", f"{mib:,.0f}"))
            say(" ".join(lines[-1]))
    print(json.dumps(machine()))
    print(markdown(("what", "rows", "rows/s", "memory at most, MiB"), lines))


if __name__ == "__main__":
    main()
