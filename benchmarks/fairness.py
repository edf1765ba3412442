"""What a tenant notices of another one's flood: `python -m benchmarks.fairness`, in virtual time.

One tenant holds 500 requests open, another sends one at a time; then two hold 500 open each: alike, one with
long prompts against one with long answers, and one through a single gateway against one through two. Queues
and turns are the gateway's and the replica's own, engines the simulator's. `first come`: without turns.
`gateway`: a replica takes as many requests as its engine runs at once, others wait in gateways, which hear
once a second what the others have served; `gateways apart` do not. `engine`: all wait in engines that
schedule by priority.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks.one_fleet import quantile
from benchmarks.one_fleet_run import ENGINE
from benchmarks.record import Spread
from benchmarks.table import markdown
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.serve.tenancy.fairness import Charge, FairLine, StartTag, StartTags, price
from penstock.transport.link import COALESCE_S

SEATS = 64
WARM_S = 20.0
MEAN = 0.1  # weight of the latest answer in what is expected of a tenant's next, as gateways have it
TOLD_S = 1.0  # between two reports of a gateway
MODES = ("first come", "gateway", "gateways apart", "engine")
FLEETS = ((1, 1), (2, 3))  # gateways, replicas


@dataclass(frozen=True, slots=True)
class Tenant:
    """open: requests at all times. prompt, answer: tokens in the mean; each is from half of it to 1.5.
    gateway: its number, or any.
    """

    name: str
    open: int
    prompt: int = 400
    answer: int = 150
    gateway: int | None = None


FLOOD, LIGHT = Tenant("flood", 500), Tenant("light", 1)
EVEN = Tenant("a", 500), Tenant("b", 500)
UNEVEN = Tenant("long", 500, 2000, 50), Tenant("short", 500, 200, 200)
ONE_SIDED = Tenant("a", 500, gateway=0), Tenant("b", 250, gateway=0), Tenant("b", 250, gateway=1)


@dataclass(slots=True)
class Seen:
    """By tenant, in the measured time. served: priced tokens. took_s: from an engine's start to the end."""

    ttft_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    took_s: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    served: Counter[str] = field(default_factory=Counter)

    def gap(self) -> float:
        """By how much less one of two tenants was served."""
        least, most = sorted(self.served.values())
        return (most - least) / most


class _Blocks:
    def __getitem__(self, index: int, /) -> int:
        return index


@dataclass(eq=False, slots=True)
class _Request(Sequence):
    tenant: Tenant = field(kw_only=True)
    gateway: int = field(kw_only=True)
    charge: Charge | None = field(kw_only=True)
    asked: float = field(kw_only=True)
    engine: _Engine | None = field(default=None, kw_only=True)
    tag: StartTag | None = field(default=None, kw_only=True)


class _Engine:
    def __init__(self, options: SimOptions) -> None:
        self.batch = Batch(options)
        self.tags = StartTags()
        self.open = 0
        self.stepping = False


class Run:
    """Tenants' clients, gateways and engines. A place that one gateway frees is its own until others hear."""

    def __init__(self, mode: str, tenants: Many[Tenant], gateways: int, replicas: int, seed: int) -> None:
        policy = "priority" if mode == "engine" else "fcfs"
        more = {"max_num_seqs": SEATS, "scheduling_policy": policy}
        options = SimOptions.model_validate({**ENGINE, **more})
        self._mode, self._dice = mode, random.Random(f"{seed} fairness")
        self._most = SEATS if mode.startswith("gateway") else 1 << 30
        self._elsewhere = [Counter[str]() for _ in range(gateways)]
        self._engines = [_Engine(options) for _ in range(replicas)]
        self._lines = [FairLine[_Request]() for _ in range(gateways)]
        self._expected = {tenant.name: float(tenant.answer) for tenant in tenants}
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = itertools.count()
        self._now, self._measures = 0.0, False
        self.seen = Seen()
        for _, gateway in itertools.product(self._engines, range(gateways)):
            self._at(self._dice.uniform(0, COALESCE_S), self._report, gateway)
        for gateway in range(gateways) if mode == "gateway" else ():
            self._at(self._dice.uniform(0, TOLD_S), self._hear, gateway)
        for tenant in tenants:
            for _ in range(tenant.open):
                self._at(self._dice.uniform(0, 1), self._ask, tenant)

    def go(self, seconds: float) -> Seen:
        for until in (WARM_S, WARM_S + seconds):
            self._measures = until > WARM_S
            while self._events[0][0] < until:
                self._now, _, act, arguments = heapq.heappop(self._events)
                act(*arguments)
        return self.seen

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), act, arguments))

    def _ask(self, tenant: Tenant) -> None:
        prompt, answer = (
            max(2, int(self._dice.uniform(0.5, 1.5) * mean)) for mean in (tenant.prompt, tenant.answer)
        )
        wanted, count = tenant.gateway, len(self._lines)
        gateway = self._dice.randrange(count) if wanted is None else wanted % count
        charge = Charge(tenant.name, 1.0, price(prompt, 0, self._expected[tenant.name]))
        request = _Request(
            *(prompt, PlannedReply((), (), answer, "length"), _Blocks(), self._now),
            tenant=tenant,
            gateway=gateway,
            charge=None if self._mode == "first come" else charge,
            asked=self._now,
        )
        self._lines[gateway].put(request, request.charge)
        self._offer(gateway)

    def _offer(self, gateway: int) -> None:
        line = self._lines[gateway]
        while len(line) and (engine := min(self._engines, key=lambda one: one.open)).open < self._most:
            request = line.first()
            if request.charge is not None:
                line.take(request.charge)
            line.discard(request, request.charge)
            self._send(request, engine)

    def _send(self, request: _Request, engine: _Engine) -> None:
        engine.open += 1
        request.engine, request.arrival = engine, self._now
        if request.charge is not None:
            request.tag = engine.tags.tag(request.tenant.name, request.charge.price)
            request.priority = request.tag.number
        engine.batch.submit(request)
        if not engine.stepping:
            self._step(engine)

    def _report(self, gateway: int) -> None:
        self._offer(gateway)
        self._at(self._now + COALESCE_S, self._report, gateway)

    def _hear(self, gateway: int) -> None:
        """Of what the other gateways have served."""
        found, self._elsewhere[gateway] = self._elsewhere[gateway], Counter()
        for tenant, amount in found.items():
            self._lines[gateway].add(tenant, amount)
        self._at(self._now + TOLD_S, self._hear, gateway)

    def _step(self, engine: _Engine) -> None:
        engine.stepping = not engine.batch.idle()
        if engine.stepping:
            self._at(engine.batch.begin_step(), self._end_step, engine)

    def _end_step(self, engine: _Engine) -> None:
        for request in engine.batch.end_step():
            assert isinstance(request, _Request)
            name, first = request.tenant.name, request.made == 1
            if first and request.tag is not None:
                request.tag.began()
            if self._measures:
                self.seen.served[name] += int(price(request.prompt_tokens if first else 0, 0, 1))
                if first:
                    self.seen.ttft_s[name].append(self._now - request.asked)
            if request.made == request.reply.tokens:
                self._ended(request, engine)
        self._step(engine)

    def _ended(self, request: _Request, engine: _Engine) -> None:
        engine.open -= 1
        name, answer = request.tenant.name, request.reply.tokens
        self._expected[name] += MEAN * (answer - self._expected[name])
        cost = price(request.prompt_tokens, 0, answer)
        if request.charge is not None:
            request.charge.settle(cost)
        for gateway, elsewhere in enumerate(self._elsewhere):
            if gateway != request.gateway:
                elsewhere[name] += cost
        if self._measures and request.scheduled is not None:
            self.seen.took_s[name].append(self._now - request.scheduled)
        self._at(self._now, self._ask, request.tenant)
        self._offer(request.gateway)


@dataclass(slots=True)
class Row:
    """Of one seed. Units: ms, and priced tokens; gaps: as `Seen.gap`, of two that always wait."""

    turns: str
    gateways: int
    replicas: int
    seed: int
    alone_p99_ms: float
    light_p50_ms: float
    light_p99_ms: float
    service_ms: float
    gap: float
    long_gap: float
    one_sided_gap: float
    tokens_per_s: float


def row(mode: str, gateways: int, replicas: int, seed: int, seconds: float) -> Row:
    """Runs of all kinds for one way of waiting."""

    def seen(*tenants: Tenant) -> Seen:
        return Run(mode, tenants, gateways, replicas, seed).go(seconds)

    alone, flooded, even, uneven = seen(LIGHT), seen(FLOOD, LIGHT), seen(*EVEN), seen(*UNEVEN)
    light = flooded.ttft_s["light"]
    return Row(
        *(mode, gateways, replicas, seed),
        1e3 * quantile(alone.ttft_s["light"], 0.99),
        *(1e3 * quantile(light, 0.5), 1e3 * quantile(light, 0.99)),
        1e3 * fmean(flooded.took_s["flood"]),
        *(even.gap(), uneven.gap(), seen(*ONE_SIDED).gap()),
        flooded.served.total() / seconds,
    )


_HEAD = {
    "turns": "",
    "gateways, replicas": "",
    "TTFT p99 alone ms": ",.0f",
    "beside the flood p50": ",.0f",
    "p99": ",.0f",
    "one request takes ms": ",.0f",
    "served apart": ".1%",
    "long against short": ".1%",
    "one gateway against two": ".1%",
    "priced tokens/s": ",.0f",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="measured virtual seconds")
    parser.add_argument(
        "--seeds", type=int, default=5, help="the table has the median, the least and the most"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the figures there")
    given = parser.parse_args()
    groups = [
        [row(mode, *fleet, seed, given.seconds) for seed in range(given.seeds)]
        for fleet in FLEETS
        for mode in MODES
    ]
    print(markdown([*_HEAD], map(_cells, groups)))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for rows in groups for one in rows]))


def _cells(rows: Many[Row]) -> list[str]:
    names, formats = Row.__slots__[4:], [*_HEAD.values()][2:]
    cells = (
        _spread((getattr(one, name) for one in rows), form) for name, form in zip(names, formats, strict=True)
    )
    return [rows[0].turns, f"{rows[0].gateways}, {rows[0].replicas}", *cells]


def _spread(values: Iterable[float], form: str) -> str:
    found = Spread.of(values)
    return f"{found.middle:{form}} ({found.low:{form}} to {found.high:{form}})"


if __name__ == "__main__":
    main()
