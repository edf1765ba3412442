"""The gateway alone: what it adds to a replica that does next to nothing.

    python -m benchmarks.gateway [--only json,events,...] [--quick] [--json FILE]

Replicas and the gateway run in processes of their own, without Ray; replicas are asked straight and through
the gateway in turns. "sim" is the simulator, "plain" an app that answers at once (see `plain`), where the
simulator would be what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import choices, cleaned_up, say
from benchmarks.fleet import Gateway, Replica
from benchmarks.record import Record
from benchmarks.table import Row, markdown
from benchmarks.trial import Question, Trial, run

_AT_ONCE = {"step_base_ms": 0, "step_per_request_ms": 0, "prefill_tokens_per_s": 1e9, "reply": "word " * 8}
_NOISY_CORES = 0.1
_MIB = 2**20
_OWN_FILES = 200  # of a process, beside its streams


@dataclass(slots=True)
class Section:
    """One table, what it was made from, and what must be known to read it."""

    title: str
    head: Row
    rows: list[Row] = field(default_factory=list[Row])
    records: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    remarks: list[str] = field(default_factory=list[str])
    noisy: list[str] = field(default_factory=list[str])

    def add(self, row: Row, *trials: Trial) -> None:
        self.rows.append(row)
        say("    " + ", ".join(row))
        for trial in trials:
            self.records.append(trial.to_json())
            if trial.foreign_cores > _NOISY_CORES:
                self.noisy.append(f"{trial.what} ({trial.foreign_cores:.1f})")

    def text(self) -> str:
        noise = [f"Noisy; others took so many cores: {', '.join(self.noisy)}."] if self.noisy else []
        return "\n\n".join([f"### {self.title}", markdown(self.head, self.rows), *self.remarks, *noise])


def short_json(scale: float) -> Section:
    """Short JSON answers: rate, added latency, CPU."""
    section = Section(
        "Short JSON answers",
        [
            *("replica, load", "straight req/s", "p50 ms", "p99 ms"),
            *("gateway req/s", "p50 ms", "p99 ms", "added p50", "added p99"),
            *("gateway us/request", "req/s a core", "failed"),
        ],
    )
    for app, options in (("sim", _AT_ONCE), ("plain", {})):
        with Replica(app, **options) as replica, Gateway(replica) as gateway:
            for streams, every_s in ((1, 0.0), (16, 0.0), (64, 0.0), (32, 0.032)):
                load = f"{streams / every_s:,.0f} req/s paced" if every_s else f"{streams} clients"
                ask = {"streams": streams, "seconds": 4 * scale, "every": every_s}
                straight = run(f"json {app} straight", replica, [replica], Question(), **ask)
                through = run(f"json {app} gateway", gateway, [gateway, replica], Question(), **ask)
                section.add(_json_row(f"{app}, {load}", straight, through), straight, through)
    return section


def _json_row(name: str, straight: Trial, through: Trial) -> Row:
    us = through.cpu_us(0, "requests_all")
    return [
        *(name, f"{straight.requests_per_s:,.0f}", f"{straight.ms('p50'):.2f}", f"{straight.ms('p99'):.2f}"),
        *(f"{through.requests_per_s:,.0f}", f"{through.ms('p50'):.2f}", f"{through.ms('p99'):.2f}"),
        f"{through.ms('p50') - straight.ms('p50'):.2f}",
        f"{through.ms('p99') - straight.ms('p99'):.2f}",
        *(f"{us:.0f}", f"{1e6 / us:,.0f}", str(straight.failed + through.failed)),
    ]


def events(scale: float) -> Section:
    """CPU per relayed event."""
    section = Section(
        "CPU per relayed event of 220 bytes",
        [
            *("replica, load", "events/s", "gateway us/event", "replica us/event"),
            *("straight us/event", "ITL p99 ms", "straight ITL p99", "failed"),
        ],
    )
    kinds = (
        ("plain, 64 x 200/s", "plain", {"every_s": 0.005, "events": 200}, 64),
        ("plain, 16 x 50/s", "plain", {"every_s": 0.02, "events": 50}, 16),
        ("plain, 64, as fast as taken", "plain", {"events": 200}, 64),
        ("sim, 64 x 100/s", "sim", {**_AT_ONCE, "step_base_ms": 10}, 64),
    )
    for name, app, options, streams in kinds:
        question = Question(stream=True, tokens=100)
        with Replica(app, **options) as replica, Gateway(replica) as gateway:
            ask = {"streams": streams, "seconds": 4 * scale}
            straight = run(f"events {name} straight", replica, [replica], question, **ask)
            through = run(f"events {name} gateway", gateway, [gateway, replica], question, **ask)
            row = [
                *(name, f"{through.events_per_s:,.0f}", f"{through.cpu_us(0, 'events_all'):.1f}"),
                f"{through.cpu_us(1, 'events_all'):.1f}",
                f"{straight.cpu_us(0, 'events_all'):.1f}",
                f"{through.ms('p99', 'itl_ms'):.1f}",
                f"{straight.ms('p99', 'itl_ms'):.1f}",
                str(straight.failed + through.failed),
            ]
            section.add(row, straight, through)
    return section


def streams(scale: float) -> Section:
    """Many open streams, each with two events a second."""
    section = Section(
        "Many open streams (plain, 2 events a second each)",
        ["streams", "events/s", "of asked", "ITL p99 ms", "gateway KiB/stream", "gateway us/event", "failed"],
    )
    for asked in (2_000, 10_000):
        count = min(asked, (_most_files() - _OWN_FILES) // 2)
        if count < asked:
            section.remarks.append(
                f"{asked:,} streams need {2 * asked + _OWN_FILES:,} open files in the gateway, one to the "
                f"client and one to the replica; the limit here (ulimit -Hn) allows {count:,} streams."
            )
        with Replica("plain", every_s=0.5, events=24) as replica, Gateway(replica) as gateway:
            trial = run(
                f"{count} streams",
                gateway,
                [gateway, replica],
                Question(stream=True, tokens=24),
                streams=count,
                warmup_s=5.0,
                seconds=6 * scale,
                ramp=4.0,
                drain_s=20.0,
            )
        row = [
            *(f"{count:,}", f"{trial.events_per_s:,.0f}", f"{trial.events_per_s / (2 * count):.0%}"),
            f"{trial.ms('p99', 'itl_ms'):.0f}",
            f"{trial.grown(0) / count / 1024:.1f}",
            f"{trial.cpu_us(0, 'events_all'):.1f}",
            str(trial.failed),
        ]
        section.add(row, trial)
    return section


def bodies(scale: float) -> Section:
    """Large request bodies, `model` at their end."""
    section = Section(
        "Request bodies (plain; `model` stands last)",
        [
            *("body, load", "straight p50 ms", "gateway p50 ms", "added p50", "added p99"),
            *("gateway ms/request", "gateway peak MiB", "failed"),
        ],
    )
    for size, clients in (
        (1_000, 1),
        (100_000, 1),
        (1_000_000, 1),
        (10_000_000, 1),
        (1_000_000, 32),
        (10_000_000, 16),
    ):
        with Replica("plain") as replica, Gateway(replica) as gateway:
            ask = {"streams": clients, "seconds": 4 * scale}
            question = Question(size=size)
            straight = run(f"body {size} straight", replica, [replica], question, **ask)
            through = run(f"body {size} gateway", gateway, [gateway, replica], question, **ask)
            peak = gateway.spent().most_memory - through.before[0].memory
        row = [
            f"{size / 1e3:,.0f} KB, {clients} client{'s' if clients > 1 else ''}",
            *(f"{straight.ms('p50'):.2f}", f"{through.ms('p50'):.2f}"),
            f"{through.ms('p50') - straight.ms('p50'):.2f}",
            f"{through.ms('p99') - straight.ms('p99'):.2f}",
            f"{through.cpu_us(0, 'requests_all') / 1e3:.2f}",
            f"{peak / _MIB:.0f}",
            str(straight.failed + through.failed),
        ]
        section.add(row, straight, through)
    return section


def pick(scale: float) -> Section:
    """What choosing a replica costs, by policy and number of replicas."""
    from penstock.serve.routing.registry import BY_NAME

    counts = (1, 10, 100, 1_000)
    section = Section(
        "Picking a replica, and remembering it: us p50 (p99), prompts of 8 KB that share 4 KB with others",
        ["policy", *(f"{count:,} replicas" for count in counts)],
    )
    for name in BY_NAME:
        row = [name]
        for count in counts:
            taken = sorted(_pick_times(name, count, round(10_000 * scale)))
            p50, p99 = statistics.median(taken), taken[int(0.99 * len(taken))]
            row.append(f"{1e6 * p50:.1f} ({1e6 * p99:.1f})")
            section.records.append({"policy": name, "replicas": count, "p50_s": p50, "p99_s": p99})
        section.add(row)
    return section


def _pick_times(name: str, replicas: int, times: int) -> Iterator[float]:
    """Of a policy with a table that is full of ready replicas, in the middle of its work."""
    from penstock.serve.fleet.table import Table
    from penstock.serve.routing import RoutingRequest, policy
    from penstock.serve.routing.policy import Learns
    from penstock.serve.routing.prefix_hashes import blocks, home
    from penstock.transport.address import Address
    from penstock.transport.link import Hello, LoadReport

    table, chosen = Table("node"), policy(name)
    learns = chosen if isinstance(chosen, Learns) else None
    names = [f"r{i}" for i in range(replicas)]
    table.set_members("m", {name: Address(name, "node", None, None, None, "") for name in names})
    for replica in table.members("m"):
        table.hello(replica, Hello("m"))
        table.report(replica, LoadReport())
    clock = time.perf_counter
    for i in range(times):
        prompt = b"%4d" % (i % 64) * 1_024 + b"%4d" % (i % 1_024) * 1_024
        asked = RoutingRequest("", f"session {i % 512}", 2_048, blocks(prompt), home(prompt))
        began = clock()
        found = chosen.pick(asked, table.candidates("m"), float(i))
        assert found is not None
        if learns is not None:
            learns.sent(asked, found.replica, float(i))
        yield clock() - began


def slow(scale: float) -> Section:
    """1,000 readers of 1 KB/s, offered 40 KB/s each."""
    section = Section(
        "1,000 clients that read 1 KB/s (plain, 40 KB/s offered to each)",
        ["after s", "read B/s each", "gateway MiB", "replica MiB", "kernel's TCP buffers MiB", "failed"],
    )
    for seconds in (10, round(40 * scale)):
        options = {"every_s": 0.05, "events": 1_000_000, "event_bytes": 2_000}
        with Replica("plain", **options) as replica, Gateway(replica) as gateway:
            trial = run(
                f"slow readers, {seconds} s",
                gateway,
                [gateway, replica],
                Question(stream=True),
                streams=1_000,
                warmup_s=2.0,
                seconds=seconds,
                ramp=2.0,
                drain_s=0.0,
                read_bytes=256,
                read_every=0.25,
            )
        failures = {k: n for k, n in trial["failures"].items() if n and k != "unfinished"}
        row = [
            *(str(seconds), f"{trial['bytes_all'] / 1_000 / (seconds + 2):,.0f}"),
            *(f"{trial.grown(0) / _MIB:.0f}", f"{trial.grown(1) / _MIB:.0f}"),
            *(f"{trial.tcp_bytes / _MIB:.0f}", str(sum(failures.values()))),
        ]
        section.add(row, trial)
    section.remarks.append(
        "MiB are what the processes have more than before, and what the kernel holds in TCP buffers on the "
        "whole machine. Answers are cut at the end."
    )
    return section


def gateways(scale: float) -> Section:
    """Several gateway processes on one port."""
    section = Section(
        "Gateway processes on one port (plain, 64 clients)",
        ["gateways", "req/s", "p50 ms", "p99 ms", "events/s", "cores used, by gateway", "failed"],
    )
    for count in (1, 2):
        with contextlib.ExitStack() as stack:
            replica = stack.enter_context(Replica("plain", events=200))
            fleet = [stack.enter_context(Gateway(replica, share_port=True))]
            while len(fleet) < count:
                fleet.append(stack.enter_context(Gateway(replica, port=fleet[0].port, share_port=True)))
            ask = {"streams": 64, "seconds": 4 * scale}
            short = run(f"{count} gateways, json", fleet[0], [*fleet, replica], Question(), **ask)
            long = run(f"{count} gateways, streams", fleet[0], [*fleet, replica], Question(True, 200), **ask)
        cores = [f"{seconds / (short['seconds'] + 1):.2f}" for seconds in short.cpu_s[:-1]]
        row = [
            *(str(count), f"{short.requests_per_s:,.0f}", f"{short.ms('p50'):.2f}", f"{short.ms('p99'):.2f}"),
            *(f"{long.events_per_s:,.0f}", " + ".join(cores), str(short.failed + long.failed)),
        ]
        section.add(row, short, long)
    return section


SECTIONS: dict[str, Callable[[float], Section]] = {
    "json": short_json,
    "events": events,
    "streams": streams,
    "bodies": bodies,
    "pick": pick,
    "slow": slow,
    "gateways": gateways,
}


def _most_files() -> int:
    """Open files that a process may have; the children of this one may have them, too."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def main(words: Sequence[str] | None = None) -> int:
    """Prints what was measured."""
    options = _options(words)
    record = Record(settings={"only": options.only, "quick": options.quick})
    sections: dict[str, Section] = {}
    with cleaned_up():
        for name in options.only:
            say(f"{name}: {SECTIONS[name].__doc__}")
            sections[name] = SECTIONS[name](0.4 if options.quick else 1.0)
    print("\n\n".join(section.text() for section in sections.values()))
    if options.json:
        found = {name: section.records for name, section in sections.items()}
        options.json.write_text(json.dumps({**record.to_json(), "sections": found}, indent=1) + "\n")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=_FIRST_LINE)
    add = parser.add_argument
    add("--only", type=choices(list(SECTIONS)), default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    add("--quick", action="store_true", help="less than half the time for each measurement")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    return parser.parse_args(words)


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
