"""What choosing a replica costs, for each policy by the number of replicas: `python -m benchmarks.pick`.

No sockets and no event loop: the table, a policy, and prompts of 4 KB. The prefix policy's memory is full.
Where requests name adapters, each replica has 16 of 500 loaded.
Printed are microseconds for a request's whole way: what is read of its body, the pick, and what is learned.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.table import markdown
from penstock.config.schema.routing import POLICIES
from penstock.serve.fleet.table import Table
from penstock.serve.gateway import body
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.routing_features import FeatureReader
from penstock.serve.routing import Policy, RoutingRequest, policy
from penstock.serve.routing.policy import Learns
from penstock.serve.routing.prefix_index import ENTRIES
from penstock.transport.address import Address
from penstock.transport.link import AdapterReport, Hello, LoadReport

COUNTS = (1, 10, 100, 1_000)
_PROMPT_BYTES = 4_000
_LIMIT = 100
_ADAPTERS, _SLOTS = 500, 16
_KNOW_ADAPTERS = ("prefix_affinity", "adapter_affinity", "least_loaded")
_RUNS = [*((name, False) for name in POLICIES), *((name, True) for name in _KNOW_ADAPTERS)]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one policy among so many replicas. Units: microseconds."""

    policy: str
    replicas: int
    fleet: str
    p50_us: float
    p99_us: float


def fleet(replicas: int, full: int = 0) -> Table:
    """A table of ready replicas; the first `full` of them have no room."""
    table = Table("node")
    table.limit("m", _LIMIT, _SLOTS)
    names = [f"replica-{i}" for i in range(replicas)]
    table.set_members("m", {name: Address(name, "node", None, None, None, "") for name in names})
    for i, replica in enumerate(table.members("m")):
        table.hello(replica, Hello("m", 32_768))
        table.report(replica, LoadReport(running=i % 8, elsewhere=_LIMIT if i < full else 0))
        table.adapters(replica, AdapterReport(tuple(f"a{(7 * i + n) % _ADAPTERS}" for n in range(_SLOTS))))
    return table


def measure(name: str, table: Table, what: str, times: int, adapters: bool = False) -> Cost:
    """Requests one after another, each known from its second time on."""
    title = f"{name}, adapters" if adapters else name
    chosen = policy(name)
    reading = FeatureReader(ServedModel("m", 1), chosen, table)
    _fill(chosen, table)
    bodies = [_body(i) for i in range(256)]
    learn = chosen.sent if isinstance(chosen, Learns) else None

    def one(content: bytes, now: float) -> None:
        adapter = f"a{int(1e3 * now) % _ADAPTERS}" if adapters else ""
        asked = reading.read(adapter, body.fields(content), [], len(content))
        pick = chosen.pick(asked, table.candidates("m"), now)
        if pick is not None:
            if learn is not None:
                learn(asked, pick.replica, now)
            table.release(table.acquire(pick.replica, asked.tokens, adapter))

    spent = sorted(_timed(one, bodies, times))
    p99 = spent[int(0.99 * len(spent))]
    return Cost(title, len(table.members("m")), what, 1e6 * statistics.median(spent), 1e6 * p99)


def costs(times: int = 5_000) -> Iterator[Cost]:
    """Every policy at every size, and among a thousand of which all or all but one are full."""
    for name, adapters in _RUNS:
        for count in COUNTS:
            yield measure(name, fleet(count), "with room", times, adapters)
        yield measure(name, fleet(1_000, full=999), "all but one full", times, adapters)
        yield measure(name, fleet(1_000, full=1_000), "all full", times, adapters)


def table_of(found: Sequence[Cost]) -> str:
    """Markdown: a line for each policy, a column for each size."""
    columns = list(dict.fromkeys((cost.replicas, cost.fleet) for cost in found))
    head = ["us, p50 (p99)", *(f"{count:,} {what}" for count, what in columns)]
    names = dict.fromkeys(cost.policy for cost in found)
    rows = [[name, *(_cell(found, name, column) for column in columns)] for name in names]
    return markdown(head, rows)


def _cell(found: Sequence[Cost], name: str, column: tuple[int, str]) -> str:
    cost = next(cost for cost in found if (cost.policy, cost.replicas, cost.fleet) == (name, *column))
    return f"{cost.p50_us:.1f} ({cost.p99_us:.0f})"


def _body(i: int) -> bytes:
    text = f"conversation {i} " + "and so on " * (_PROMPT_BYTES // 10)
    messages = [{"role": "user", "content": text}]
    return msgspec.json.encode({"model": "m", "messages": messages, "user": f"user {i}", "stream": True})


def _fill(chosen: Policy, table: Table) -> None:
    if isinstance(chosen, Learns):
        members = table.members("m")
        for i in range(0, ENTRIES, 16):
            asked = RoutingRequest(blocks=tuple(hash((i, n)) for n in range(16)))
            chosen.sent(asked, members[i // 16 % len(members)], 0.0)


def _timed(one: Callable[[bytes, float], None], bodies: Sequence[bytes], times: int) -> Iterator[float]:
    clock = time.perf_counter
    for i in range(times):
        began = clock()
        one(bodies[i % len(bodies)], i / 1e3)
        yield clock() - began


if __name__ == "__main__":
    print(table_of(list(costs())))
