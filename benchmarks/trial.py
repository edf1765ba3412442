"""One trial: the load generator on one target, and what the processes that took part spent meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.fleet import Child, Gateway, Replica, Spent
from benchmarks.load import Generator
from benchmarks.workload import MODEL_ID


@dataclass(frozen=True, slots=True)
class Question:
    """A chat request. Units: tokens of its answer; bytes of its body, as near as they can be."""

    stream: bool = False
    tokens: int = 8
    size: int = 0

    def body(self) -> dict[str, Any]:
        """`model` stands last, where a large body hides it best."""
        content = "def foo(x):" + "word " * max(0, (self.size - 150) // 5)
        return {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.tokens,
            "stream": self.stream,
            "ignore_eos": True,
            "model": MODEL_ID,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it. Lists are by part, in the order in which they were named.

    during: what the parts had in the last quarter of the measured time. tcp_bytes: what the kernel held then,
    on the whole machine. foreign_cores: what others took of the machine meanwhile.
    """

    what: str
    streams: int
    figures: dict[str, Any]
    cpu_s: list[float]
    before: list[Spent]
    during: list[Spent]
    foreign_cores: float
    tcp_bytes: int

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def requests_per_s(self) -> float:
        return self["requests"] / self["seconds"]

    @property
    def events_per_s(self) -> float:
        return self["events"] / self["seconds"]

    @property
    def failed(self) -> int:
        return sum(self["failures"].values())

    def ms(self, percentile: str, name: str = "latency_ms") -> float:
        return self[name][percentile]

    def cpu_us(self, part: int, per: str) -> float:
        """CPU microseconds of a part, per "requests_all" or "events_all"."""
        return 1e6 * self.cpu_s[part] / max(1, self[per])

    def grown(self, part: int) -> int:
        """Bytes that a part has in the run more than before it."""
        return self.during[part].memory - self.before[part].memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    what: str,
    target: Replica | Gateway,
    parts: Sequence[Child],
    question: Question,
    *,
    streams: int,
    seconds: float,
    warmup_s: float = 1.0,
    **more: float,
) -> Trial:
    """Asks `target` and looks at `parts`."""
    usage, before = processes.usage(), [part.spent() for part in parts]
    generator = Generator(
        target.port,
        question,
        streams=streams,
        warmup_s=warmup_s,
        seconds=seconds,
        headers=target.headers,
        **more,
    )
    time.sleep(warmup_s + 0.75 * seconds)
    during, tcp_bytes = [part.spent() for part in parts], _tcp_bytes()
    load = generator.result()
    after, usage_after = [part.spent() for part in parts], processes.usage()
    own_s = sum(usage_after.since(usage).values()) + load.figures["cpu_s"]
    foreign_s = usage_after.machine_s - usage.machine_s - own_s
    return Trial(
        what,
        streams,
        load.figures,
        [then.cpu_s - now.cpu_s for then, now in zip(after, before, strict=True)],
        before,
        during,
        max(0.0, foreign_s / (usage_after.at_s - usage.at_s)),
        tcp_bytes,
    )


def _tcp_bytes() -> int:
    for line in Path("/proc/net/sockstat").read_text().splitlines():
        if line.startswith("TCP:"):
            return int(line.split()[-1]) * resource.getpagesize()
    return 0
