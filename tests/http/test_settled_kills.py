"""What the store says after kills of gateways, of control and of the process of batches; in virtual time.

Each request, and each group of a batch's rows has a key of its own: the store has the whole of it or nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interleaving import Start, virtually
from served import NODE, Replica
from test_settled import KINDS, Asked
from test_settled import given as config_of
from tests.waiting import until

from penstock.config import GatewayConfig
from penstock.errors import Unavailable
from penstock.serve.fleet.table import Table
from penstock.serve.gateway.app import Gateway
from penstock.serve.gateway.catalogue import ServedModel
from penstock.serve.gateway.tenants.registry import Tenants
from penstock.serve.tenancy.store import UsageStore
from penstock.serve.tenancy.usage import Settlement, Totals, UsageRow

pytestmark = pytest.mark.parity("X6")

REQUESTS = 100
WAY_S = 0.04
"""At most, to control or back."""
PERIOD_S = 1 + 3 * WAY_S
"""From what the store has to the next that it has, while control answers."""
AGAIN_S = 0.2 + 2 * WAY_S
"""After a settlement that was sent again: until what was counted meanwhile is settled, too."""
HANGS_S = 5.0
"""Of a call without an answer."""


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Process:
    """A gateway, or the process of batches. taken: when each settlement was taken from the counters, by its
    number. stored: the last one that the store has. trouble: when control answered again after a failed call.
    """

    tenants: Tenants
    close: Callable[[], Awaitable[None]]
    gateway: Gateway | None = None
    table: Table = field(default_factory=lambda: Table(NODE))
    open: dict[Asked, asyncio.Task[None]] = field(default_factory=dict[Asked, asyncio.Task[None]])
    taken: dict[int, float] = field(default_factory=lambda: {0: now()})
    stored = 0
    trouble = -1.0
    killed: float | None = None

    @property
    def settled(self) -> float:
        """What has ended before is in the store."""
        return self.taken[self.stored]

    async def kill(self) -> None:
        """Nothing that it does from now on has an effect."""
        self.killed = now()
        if self.killed > self.trouble + AGAIN_S:
            assert self.killed - self.settled <= PERIOD_S
        for one, task in self.open.items():
            one.left.set()
            task.cancel()
        await self.close()


class Control:
    """It comes back on the same file. is_calm: no call fails any more."""

    def __init__(self, file: Path, dice: random.Random, found: Counter[str]) -> None:
        self._file, self._dice, self._found = file, dice, found
        self.stores = [UsageStore(file)]
        self.is_up, self.is_calm, self._life = True, False, 0

    def kill(self) -> None:
        if self.is_up:
            self._found["control killed"] += 1
            self.is_up, self._life = False, self._life + 1
            asyncio.get_running_loop().call_later(self._dice.uniform(0.1, 2), self._begin)

    def _begin(self) -> None:
        self.stores.append(UsageStore(self._file))
        self.is_up = True

    async def settle(self, process: Process, settlement: Settlement) -> Totals:
        if process.killed is not None:
            raise Unavailable("It was killed.")
        if settlement.number in process.taken:
            self._found["sent again"] += 1
        process.taken.setdefault(settlement.number, now())
        faults = ("lost", "unanswered", "torn", "killed")
        fate = "" if self.is_calm else self._dice.choices(("", *faults), (60, 1, 1, 1, 1))[0]
        taking = asyncio.create_task(self._take(process, settlement, fate))
        totals = await asyncio.shield(taking)
        if totals is None:
            process.trouble = math.inf
            if fate in faults[:2]:
                await asyncio.sleep(self._dice.choice((0, HANGS_S)))
            raise Unavailable("Control does not answer now.")
        process.trouble = min(process.trouble, now())
        return totals

    async def _take(self, process: Process, settlement: Settlement, fate: str) -> Totals | None:
        """None where no answer comes. It goes on without the one that asks."""
        life = self._life
        await asyncio.sleep(self._dice.uniform(0, WAY_S))
        if fate == "lost" or not self.is_up or life != self._life:
            return None
        store = self.stores[-1]
        given = msgspec.convert(msgspec.json.decode(msgspec.json.encode(settlement)), Settlement)
        if fate == "torn":
            steps = itertools.count(-self._dice.randint(1, 400))
            store._connection.set_progress_handler(lambda: next(steps) > 0, 1)
        try:
            totals = store.settle(given)
        except sqlite3.OperationalError:
            assert fate == "torn"
            store._connection.set_progress_handler(None, 0)
            store._connection.rollback()  # as the kernel frees a killed process's locks
            self._found["torn"] += 1
            self.kill()
            return None
        self._found["counted once"] += process.stored == settlement.number
        process.stored = settlement.number
        if fate in ("torn", "killed"):
            self.kill()
        await asyncio.sleep(self._dice.uniform(0, WAY_S))
        if fate == "unanswered" or life != self._life:
            return None
        return msgspec.convert(msgspec.json.decode(msgspec.json.encode(totals)), Totals)


class Fleet:
    """Two gateways, the process of batches, control, and replicas of all of them."""

    def __init__(self, asked: list[Asked], control: Control) -> None:
        self._config, self.control = GatewayConfig(**config_of(asked, open_requests=100)), control
        self._replicas, self.all = list[Replica](), list[Process]()
        self.ended = dict[str, tuple[Process, float, Asked | UsageRow]]()
        """By key."""

    async def gateway(self) -> Process:
        async def settle(settlement: Settlement) -> Totals:
            return await self.control.settle(process, settlement)

        cards = [ServedModel("m", created=1, fallbacks=("other",), max_ongoing_requests=20)]
        cards += [ServedModel("other", created=1)]
        table = Table(NODE)
        gateway = Gateway(self._config, cards, table, settle=settle)
        assert gateway._tenants is not None
        process = Process(gateway._tenants, gateway.close, gateway, table)
        self.all.append(process)
        await gateway.start()
        for model in ("m", "other"):
            self._join(process, model)
        await until(lambda: table.ready("other"))
        return process

    async def batches(self) -> Process:
        async def settle(settlement: Settlement) -> Totals:
            return await self.control.settle(process, settlement)

        tenants = Tenants(self._config, settle)
        process = Process(tenants, tenants.close)
        self.all.append(process)
        await tenants.start()
        return process

    async def replica(self, model: str) -> None:
        self._replicas.append(await Replica.start(model, step_base_ms=50))
        for process in self.all:
            if process.killed is None:
                self._join(process, model)

    def _join(self, process: Process, model: str) -> None:
        known = [one.address for one in self._replicas if one.engine.model_id == model]
        process.table.set_members(model, {one.replica_id: one for one in known})

    async def replace_replica(self, dice: random.Random) -> None:
        """One dies, another comes."""
        gone = dice.choice(self._replicas)
        gone.listener.die("killed")
        await gone.stop()
        self._replicas.remove(gone)
        await self.replica(gone.engine.model_id)

    def ask(self, process: Process, one: Asked, start: Start) -> asyncio.Task[None]:
        async def ask() -> None:
            assert process.gateway is not None
            try:
                await one.ask(process.gateway)
            finally:
                process.open.pop(one, None)
                self.ended[one.key] = process, now(), one

        process.open[one] = start(ask())
        return process.open[one]

    def add_rows(self, process: Process, dice: random.Random) -> None:
        key = f"b{len(self.ended)}"
        row = UsageRow(dice.randint(1, 9), dice.randint(0, 99), 0, dice.randint(0, 99))
        process.tenants.add_rows("t0", key, ["m"], row)
        self.ended[key] = process, now(), row

    async def check(self, found: Counter[str]) -> None:
        """Closes what lives, then compares the store with what clients saw."""
        self.control.is_calm = True
        await until(lambda: self.control.is_up, 100)
        await asyncio.sleep(HANGS_S + 4 * PERIOD_S)
        living = [one for one in self.all if one.killed is None]
        store = UsageStore(self.control._file)
        self.control.stores.append(store)
        totals = store.settle(Settlement("test", 1, [], is_gateway=False))
        for process in living:
            for name in ("t0", "t1", "t2") if process.gateway is not None else ():
                one = process.tenants.keys.allowances[name]
                assert one.month is not None
                assert one.cost is not None
                known = one.month.used(totals.periods.month), one.cost.used(totals.periods.month)
                assert known == (totals.tokens.get(name, (0, 0))[1], totals.costs.get(name, 0))
            await process.close()
            assert process.tenants.usage.counters._rows == {}
        counts = {row["key"]: row for row in store.usage(["key"], 0)}
        assert counts.keys() <= self.ended.keys()
        for key, (process, at, seen) in self.ended.items():
            row = UsageRow(**{name: count for name, count in counts.get(key, {}).items() if name != "key"})
            if process.killed is not None and at >= process.settled and row == UsageRow():
                found["lost"] += 1
                continue
            assert process.killed is None or at <= process.settled
            found[seen.check(row) if isinstance(seen, Asked) else "rows"] += 1
            assert isinstance(seen, Asked) or seen == row

    async def close(self) -> None:
        for process in self.all:
            if process.killed is None:
                await process.close()
        await asyncio.gather(*(one.stop() for one in self._replicas))
        for store in self.control.stores:
            store.close()


def _history(seed: int, file: Path, found: Counter[str]) -> Callable[[Start], Any]:
    async def history(start: Start) -> None:
        dice = random.Random(seed)
        asked = [
            Asked(number, dice.choice(KINDS), dice.randint(1, 12), dice.choice(("m", "m", "other")))
            for number in range(REQUESTS)
        ]
        fleet = Fleet(asked, control := Control(file, dice, found))
        try:
            for model in ("m", "m", "other"):
                await fleet.replica(model)
            gateways, batches = [await fleet.gateway(), await fleet.gateway()], await fleet.batches()
            asking = list[asyncio.Task[None]]()
            for one in asked:
                asking.append(fleet.ask(dice.choice(gateways), one, start))
                if dice.random() < 0.1:
                    asyncio.get_running_loop().call_later(dice.uniform(0, 1.5), one.left.set)
                if dice.random() < 0.3:
                    fleet.add_rows(batches, dice)
                kills = [what for what in ("gateway", "control", "batches") if dice.random() < 0.015]
                if dice.random() < 0.01:
                    kills = ["gateway", "control"]
                if "control" in kills:
                    control.kill()
                if "gateway" in kills:
                    await gateways.pop(dice.randrange(2)).kill()
                    gateways.append(await fleet.gateway())
                if "batches" in kills:
                    await batches.kill()
                    batches = await fleet.batches()
                found.update(kills)
                if dice.random() < 0.04:
                    await fleet.replace_replica(dice)
                await asyncio.sleep(dice.expovariate(10))
            await asyncio.wait(asking, timeout=1000)
            assert all(task.cancelled() or task.exception() is None for task in asking)
            await fleet.check(found)
        finally:
            await fleet.close()

    return history


def test_the_store_has_what_clients_saw_but_for_the_last_second_of_what_was_killed(
    full: bool, tmp_path: Path
):
    found, files = Counter[str](), itertools.count()
    histories = 200 if full or settings().max_examples > 100 else 20

    @settings(max_examples=histories)
    @given(st.integers(0, 1 << 32))
    def run(seed: int) -> None:
        virtually(_history(seed, tmp_path / f"{next(files)}.sqlite", found), seed)

    run()
    kinds = (*KINDS, "rows", "left", "lost", "gateway", "batches", "control killed", "torn", "sent again")
    assert min(found[one] for one in (*kinds, "counted once")) > 0, found
