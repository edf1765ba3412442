"""Adapters in a real replica: what a cold one costs, a crowd before it, many through few places, memory.

    python -m benchmarks.adapters [--parts memory,first,crowd,load] [--seconds 30] [--peer] [--json FILE]

`penstock serve` runs with one replica of four places; adapters lie in a local folder and on a local S3
server, which has a process of its own. Each is a copy of one of two that were trained to answer differently,
and every answer is looked at. With `--peer` Ray Serve LLM runs in its place: `first` and `crowd` from S3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks import processes
from benchmarks.adapted import peer, penstock, stocked
from benchmarks.asking import BASE, QUESTIONS, Answer, Asker, copy_name
from benchmarks.bucket import Bucket
from benchmarks.command import add_common, choices, cleaned_up, refuse_strangers, say
from benchmarks.contestants import DidNotStart, Running
from benchmarks.gateway import Section
from benchmarks.workload import PLACES, Workload

_FILLING = 100  # requests that fill the KV cache
_ROUNDS = 20
_CROWD, _CROWDS = 64, 3
_STREAMS = 64
_MANY = 20  # adapters under load
_PASSED = (1, 50, 200)  # adapters after which memory is looked at
_LOCAL = {"first": _ROUNDS, "crowd": _CROWDS, "memory": _PASSED[-1], "load": _MANY}
_REMOTE = {"s3-first": _ROUNDS + 1, "s3-crowd": _CROWDS + 1, "s3-load": _MANY}
_HELLO = QUESTIONS[0]
_NOISY_CORES = 0.1


@dataclass(slots=True)
class Bench:
    """A running server, and what was asked of it."""

    running: Running
    asker: Asker
    bucket: Bucket
    load_s: float
    local: bool
    faults: list[str] = field(default_factory=list[str])

    def checked(self, answers: Sequence[Answer]) -> list[Answer]:
        """The good ones; the others are kept as faults."""
        self.faults += [f"{answer.adapter or 'base'}: {answer.fault}" for answer in answers if answer.fault]
        return [answer for answer in answers if not answer.fault]

    async def first_ms(self, adapter: str) -> float:
        """Time to first token of one request."""
        good = self.checked([await self.asker.ask(adapter, _HELLO, most_tokens=4)])
        return 1e3 * good[0].first_s if good else float("nan")

    async def loads(self) -> int:
        """Adapters loaded so far. Gateways are told at once; a moment later they have heard."""
        await asyncio.sleep(0.2)
        return int(await self.asker.metric("penstock_adapter_loads_total"))

    def memory_mib(self, kind: str) -> float:
        """Pages that nobody shares: those that are shared change with who else runs."""
        family = self.running.processes()
        ours = [one for one in family if processes.kind_of(processes.title(one)) == kind]
        return sum(one.memory_full_info().uss for one in ours) / 2**20


async def first(bench: Bench) -> Section:
    """One request at a time, in turns; each cold one pushes another one out."""
    kinds = ["base", "warm", "cold, folder", "cold, S3", "cold, S3, downloaded before"]
    seen: dict[str, list[float]] = {kind: [] for kind in kinds}
    warm = copy_name("s3-first", _ROUNDS)
    await bench.first_ms(warm)
    for number in range(_ROUNDS):
        folder, s3 = copy_name("first", number), copy_name("s3-first", number)
        for kind, adapter in zip(kinds, (BASE, warm, folder, s3), strict=False):
            if bench.local or adapter != folder:
                seen[kind].append(await bench.first_ms(adapter))
    for number in range(_ROUNDS):  # pushed out long ago
        await bench.first_ms(warm)
        seen[kinds[-1]].append(await bench.first_ms(copy_name("s3-first", number)))
    base = statistics.median(seen["base"])
    section = Section(
        "Time to first token, one request at a time", ["", "p50 ms", "least", "most", "of base"]
    )
    for kind, found in seen.items():
        if not found:
            continue
        p50 = statistics.median(found)
        section.add([kind, f"{p50:.1f}", f"{min(found):.1f}", f"{max(found):.1f}", f"{p50 / base:.2f}"])
    return section


async def crowd(bench: Bench) -> Section:
    """Many clients, one adapter, at the same time; cold ones are new each time."""
    head = ["64 at once ask for", "TTFT ms least", "p50", "most", "downloads", "loads", "failed"]
    section = Section("A crowd before one adapter", head)
    warm = copy_name("s3-crowd", _CROWDS)
    await bench.first_ms(warm)
    kinds: list[tuple[str, Callable[[int], str]]] = [
        ("base", lambda number: BASE),
        ("a warm one", lambda number: warm),
        ("a cold one, folder", lambda number: copy_name("crowd", number)),
        ("a cold one, S3", lambda number: copy_name("s3-crowd", number)),
    ]
    for kind, adapter in kinds:
        for number in range(_CROWDS if bench.local or "folder" not in kind else 0):
            name, before = adapter(number), await bench.loads()
            asked = (bench.asker.ask(name, _HELLO, most_tokens=4) for _ in range(_CROWD))
            good = bench.checked(await asyncio.gather(*asked))
            times = sorted(1e3 * answer.first_s for answer in good) or [float("nan")]
            section.add(
                [
                    *(kind, f"{times[0]:.0f}", f"{statistics.median(times):.0f}", f"{times[-1]:.0f}"),
                    *(
                        str(bench.bucket.reads(name)),
                        str(await bench.loads() - before) if bench.local else "not told",
                        str(_CROWD - len(good)),
                    ),
                ]
            )
    return section


async def memory(bench: Bench) -> Section:
    """After so many adapters went through the places. Before, each page of the KV cache is used once."""
    for number in range(_FILLING):
        await bench.asker.ask(BASE, f"{number} {'a ' * 300}", most_tokens=1)
    section = Section("Memory, MiB of its own", ["adapters so far", "replica", "engine core", "loads"])
    before, number = await bench.loads(), 0
    for passed in _PASSED:
        while number < passed:
            await bench.first_ms(copy_name("memory", number))
            number += 1
        sizes = (f"{bench.memory_mib(kind):.0f}" for kind in ("front", "engine"))
        section.add([str(passed), *sizes, str(await bench.loads() - before)])
    return section


async def load(bench: Bench) -> Section:
    """Base alone, as many adapters as there are places, and five times as many."""
    head = [
        "64 streams ask",
        "requests/s",
        "tok/s",
        "of base",
        "TTFT p50 ms",
        "p99",
        "loads/s",
        "wrong or failed",
    ]
    section = Section(f"Many adapters through {PLACES} places", head)
    many = [copy_name(("load", "s3-load")[number % 4 > 1], number) for number in range(_MANY)]
    seconds = bench.load_s
    levels: list[tuple[str, list[str], list[float], float]] = [
        ("the base only", [BASE], [1], seconds / 3),
        ("4 adapters", many[:PLACES], [1] * PLACES, seconds / 3),
        ("20 adapters and the base, all alike", [BASE, *many], [1] * (_MANY + 1), seconds),
        ("20 adapters, the n-th 1/n as often", many, [1 / n for n in range(1, _MANY + 1)], seconds / 2),
    ]
    base = None
    for title, adapters, weights, lasting_s in levels:
        loads, before = await bench.loads(), asyncio.get_running_loop().time()
        answers = await bench.asker.load(adapters, weights, _STREAMS, lasting_s)
        spent_s = asyncio.get_running_loop().time() - before
        loads = await bench.loads() - loads
        good = bench.checked(answers)
        tokens_per_s = sum(answer.tokens for answer in good) / spent_s
        base = base or tokens_per_s
        p50, p99 = _percentiles([1e3 * answer.first_s for answer in good])
        section.add(
            [
                *(title, f"{len(good) / spent_s:.0f}", f"{tokens_per_s:,.0f}", f"{tokens_per_s / base:.2f}"),
                *(f"{p50:.0f}", f"{p99:.0f}", f"{loads / spent_s:.1f}", str(len(answers) - len(good))),
            ]
        )
    return section


PARTS: dict[str, Callable[[Bench], Awaitable[Section]]] = {
    "memory": memory,  # first, while nothing else has grown
    "first": first,
    "crowd": crowd,
    "load": load,
}


def main() -> int:
    """Exit code 1 when an answer was wrong or missing, or the server did not start."""
    options = _options()
    sections: list[Section] = []
    faults: list[str] = []
    with cleaned_up(), tempfile.TemporaryDirectory(prefix="bench-") as folder:
        refuse_strangers(options.shared)
        bucket = Bucket(Path(folder))
        config = stocked(Path(folder) / "adapters", bucket, _LOCAL, _REMOTE)
        workload = Workload(options.model, "mp" if options.peer else "uni", options.tokens)
        contestant = peer(bucket) if options.peer else penstock(bucket, config)
        running = Running.start(contestant, workload)
        try:
            say(f"first token after {running.first_token(workload):.1f} s")
            for name in [name for name in PARTS if name in options.parts]:
                asker = Asker(running.port)
                bench = Bench(running, asker, bucket, options.seconds, not options.peer, faults)
                sections.append(asyncio.run(_part(name, bench)))
        except DidNotStart as error:
            faults.append(str(error))
        finally:
            running.stop()
        if not faults:
            running.forget()
    print("\n\n".join(section.text() for section in sections))
    if faults:
        say(f"{len(faults)} wrong or failed: " + "; ".join(faults[:5]) + f" (see {running.log})")
    if options.json:
        options.json.write_text(json.dumps([asdict(section) for section in sections], indent=1) + "\n")
    return 1 if faults else 0


async def _part(name: str, bench: Bench) -> Section:
    say(name)
    before, began_s = processes.usage(), time.process_time()
    try:
        section = await PARTS[name](bench)
    finally:
        bench.asker.close()
    after = processes.usage()
    ours_s = sum(after.since(before).values()) + time.process_time() - began_s
    foreign = (after.machine_s - before.machine_s - ours_s) / (after.at_s - before.at_s)
    if foreign > _NOISY_CORES:
        section.remarks.append(f"Noisy: other processes took {foreign:.1f} cores meanwhile.")
    return section


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values) or [float("nan")]
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=_FIRST_LINE)
    add = parser.add_argument
    add("--parts", type=choices(list(PARTS)), default=list(PARTS), metavar="a,b", help=", ".join(PARTS))
    add("--peer", action="store_true", help="Ray Serve LLM instead")
    add("--seconds", type=float, default=30.0, help="of the longest load")
    add_common(parser)
    options = parser.parse_args()
    if options.peer:
        options.parts = [name for name in options.parts if name in ("first", "crowd")]
    return options


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
