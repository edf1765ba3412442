"""A fleet in virtual time: simulated engines, gateways with tables and policies of their own, and clients.

The engines are the simulator's batches, the tables and policies the gateway's own objects, read from whole
bodies as the gateway reads them. What is left out is what takes well under a millisecond: sockets, the relay.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean

from benchmarks.prompts import BYTES_PER_TOKEN, Turn, Workload
from benchmarks.slots import Slots
from penstock.engines.sim.batch import Batch, Sequence
from penstock.engines.sim.options import SimOptions
from penstock.engines.sim.reply import PlannedReply
from penstock.serve.fleet.replica import Lease, Replica
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import body
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.routing_features import FeatureReader
from penstock.serve.routing import policy
from penstock.serve.routing.policy import Learns
from penstock.transport import link
from penstock.transport.address import Address

MODEL_ID = "m"
_ARRIVE_WITHIN_S = 5.0
_LOOK_S = 0.5
_SLOT_S = 0.02  # until the next try, while every slot is in use


@dataclass(frozen=True, slots=True)
class Plan:
    """One simulated run. Units: seconds; `warmup_s` is not measured."""

    policy: str
    replicas: int
    gateways: int
    warmup_s: float
    measured_s: float
    options: SimOptions
    seed: int = 0
    adapter_slots: int = 0


@dataclass(slots=True)
class Tally:
    """What was seen in the measured time. imbalance: open requests of the busiest over the mean, by looks.
    sent: requests by replica.
    """

    ttft_s: list[float] = field(default_factory=list[float])
    imbalance: list[float] = field(default_factory=list[float])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    made_tokens: int = 0
    requests: int = 0
    preemptions: int = 0
    loads: int = 0
    sent: Counter[str] = field(default_factory=Counter[str])


class TextHashes:
    """The engine's block hashes of a text to an adapter, each computed when it is asked for."""

    def __init__(self, text: bytes, block_size: int, adapter: str = "") -> None:
        self._root = hash(adapter) if adapter else 0
        self._text = text
        self._size = block_size * BYTES_PER_TOKEN
        self._hashes: list[int] = []

    def __getitem__(self, index: int, /) -> int:
        hashes, size = self._hashes, self._size
        for at in range(len(hashes), index + 1):
            hashes.append(
                hash((hashes[-1] if hashes else self._root, self._text[at * size : (at + 1) * size]))
            )
        return hashes[index]


@dataclass(eq=False, slots=True)
class _Request(Sequence):
    """An open request: whose it is, and where it was sent."""

    turns: Iterator[Turn] = field(kw_only=True)
    gateway: Gateway = field(kw_only=True)
    place: Lease = field(kw_only=True)

    @property
    def adapter(self) -> str:
        return self.place.adapter


class Gateway:
    """One gateway's view of the fleet, and its choice. Nothing is shared with other gateways."""

    def __init__(self, plan: Plan, addresses: dict[str, Address]) -> None:
        card = ServedModel(MODEL_ID, 0, adapter_slots=plan.adapter_slots)
        self._catalogue = Catalogue([card], None)
        self._policy = policy(plan.policy)
        self._learns = self._policy if isinstance(self._policy, Learns) else None
        self.table = Table("node")
        self._reading = FeatureReader(card, self._policy, self.table)
        self.table.limit(MODEL_ID, card.max_ongoing_requests, card.adapter_slots)
        self.table.set_members(MODEL_ID, addresses)
        hello = link.Hello(MODEL_ID, plan.options.max_model_len, plan.options.kv_tokens)
        for replica in self.table.members(MODEL_ID):
            self.table.hello(replica, hello)
            self.table.report(replica, link.LoadReport())

    def send(self, content: bytes, now: float) -> Lease | None:
        """A place for the request, as the gateway's line takes it; None when all are at their limit."""
        fields = body.fields(content)
        _, adapter = self._catalogue.resolve(fields.model)
        asked = self._reading.read(adapter, fields, (), len(content))
        pick = self._policy.pick(asked, self.table.candidates(MODEL_ID), now)
        if pick is None:
            return None
        place = self.table.acquire(pick.replica, max(0, asked.tokens - pick.saved_tokens), adapter)
        if self._learns is not None:
            self._learns.sent(asked, pick.replica, now)
        return place


class _Engine:
    """One replica's engine, and what it reports to each gateway."""

    def __init__(self, options: SimOptions, adapter_slots: int) -> None:
        self.batch = Batch(options)
        self.slots: Slots[_Request] = Slots(adapter_slots)
        self.stepping = False
        self.open: dict[Gateway, int] = {}
        self.seen_as: dict[Gateway, Replica] = {}

    def report(self) -> None:
        load = self.batch.load()
        total = sum(self.open.values())
        for gateway, replica in self.seen_as.items():
            elsewhere = total - self.open[gateway]
            report = link.LoadReport(
                "ready", load.running, load.waiting, load.waiting_tokens, load.kv_usage, elsewhere
            )
            gateway.table.report(replica, report)

    def report_adapters(self) -> None:
        for gateway, replica in self.seen_as.items():
            gateway.table.adapters(replica, link.AdapterReport(self.slots.loaded))


Client = tuple[float, Iterator[Turn]]
"""When its first request comes, in seconds, and all that it asks."""


def closed_loop(workload: Workload, plan: Plan) -> Iterable[Client]:
    """Clients of which each asks again when it has thought about the last answer."""
    client = workload.make(plan.replicas)
    for number in range(workload.clients * plan.replicas):
        draw = random.Random(f"{plan.seed} {number}")
        yield draw.uniform(0, _ARRIVE_WITHIN_S), client(f"u{number}", draw)


class Fleet:
    """Runs one plan. The same plan and clients give the same tally."""

    def __init__(self, plan: Plan, clients: Iterable[Client]) -> None:
        random.seed(plan.seed)  # the policies' own dice
        self._plan = plan
        self._dice = random.Random(f"{plan.seed} fleet")
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = itertools.count()
        self._now = 0.0
        self._tally = Tally()
        addresses = {f"r{i}": _address(f"r{i}") for i in range(plan.replicas)}
        self._engines = {name: _Engine(plan.options, plan.adapter_slots) for name in addresses}
        self._gateways = [Gateway(plan, addresses) for _ in range(plan.gateways)]
        for gateway in self._gateways:
            for replica in gateway.table.members(MODEL_ID):
                engine = self._engines[replica.id]
                engine.open[gateway], engine.seen_as[gateway] = 0, replica
        self._begin(clients)

    def run(self) -> Tally:
        """What the measured time showed."""
        for until in (self._plan.warmup_s, self._plan.warmup_s + self._plan.measured_s):
            self._tally = Tally(preemptions=-self._preemptions())
            while self._events[0][0] < until:
                self._now, _, act, arguments = heapq.heappop(self._events)
                act(*arguments)
        self._tally.preemptions += self._preemptions()
        return self._tally

    def _begin(self, clients: Iterable[Client]) -> None:
        for begins, turns in clients:
            self._at(begins, self._ask, turns, next(turns))
        for engine in self._engines.values():
            self._at(self._dice.uniform(0, link.COALESCE_S), self._report, engine)
        self._at(self._plan.warmup_s, self._look)

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), act, arguments))

    def _ask(self, turns: Iterator[Turn], turn: Turn) -> None:
        gateway = self._dice.choice(self._gateways)
        place = gateway.send(turn.body, self._now)
        if place is None:
            return self._at(self._now + link.COALESCE_S, self._ask, turns, turn)
        engine = self._engines[place.replica.id]
        engine.open[gateway] += 1
        self._tally.sent[place.replica.id] += 1
        reply = PlannedReply((), (), turn.answer_tokens, "length")
        hashes = TextHashes(turn.text, self._plan.options.block_size, place.adapter)
        request = _Request(
            turn.prompt_tokens, reply, hashes, self._now, turns=turns, gateway=gateway, place=place
        )
        if request.adapter and not engine.slots.use(request.adapter):
            return self._wait(engine, request)
        return self._submit(engine, request)

    def _submit(self, engine: _Engine, request: _Request) -> None:
        engine.batch.submit(request)
        if not engine.stepping:
            self._step(engine)

    def _wait(self, engine: _Engine, request: _Request) -> None:
        if engine.slots.wait(request.adapter, request):
            self._tally.loads += 1
            self._at(self._now + self._plan.options.adapter_load_s, self._put, engine, request.adapter)

    def _put(self, engine: _Engine, adapter: str) -> None:
        waited = engine.slots.put(adapter)
        if not waited:
            return self._at(self._now + _SLOT_S, self._put, engine, adapter)
        engine.report_adapters()
        for request in waited:
            engine.slots.use(adapter)
            self._submit(engine, request)
        return None

    def _step(self, engine: _Engine) -> None:
        engine.stepping = not engine.batch.idle()
        if engine.stepping:
            self._at(engine.batch.begin_step(), self._end_step, engine)

    def _end_step(self, engine: _Engine) -> None:
        made = engine.batch.end_step()
        self._tally.made_tokens += len(made)
        for request in made:
            if request.made == 1:
                self._begun(request)
            if request.made == request.reply.tokens:
                assert isinstance(request, _Request)
                self._ended(engine, request)
        self._step(engine)

    def _begun(self, request: Sequence) -> None:
        tally = self._tally
        tally.ttft_s.append(self._now - request.arrival)
        tally.prompt_tokens += request.prompt_tokens
        tally.cached_tokens += request.cached_tokens

    def _ended(self, engine: _Engine, request: _Request) -> None:
        self._tally.requests += 1
        engine.open[request.gateway] -= 1
        request.gateway.table.release(request.place)
        if request.adapter:
            engine.slots.leave(request.adapter)
        if turn := next(request.turns, None):
            self._at(self._now + turn.think_s, self._ask, request.turns, turn)

    def _report(self, engine: _Engine) -> None:
        engine.report()
        self._at(self._now + link.COALESCE_S, self._report, engine)

    def _look(self) -> None:
        busy = [sum(engine.open.values()) for engine in self._engines.values()]
        if any(busy):
            self._tally.imbalance.append(max(busy) / fmean(busy))
        self._at(self._now + _LOOK_S, self._look)

    def _preemptions(self) -> int:
        return sum(engine.batch.counts.preemptions for engine in self._engines.values())


def _address(name: str) -> Address:
    return Address(name, "node", None, None, None, "")
