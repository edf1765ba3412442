"""What tenants have used: counted in gateways, sent to a store in numbered settlements.

A settlement is sent again, unchanged, until the store has it; the store takes each number once. So nothing is
counted twice, and a process that is killed loses what it has counted since its last settlement.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass

import msgspec

from penstock.serve.tenancy.fairness import price
from penstock.serve.tenancy.limits import WINDOW_S, Allowance, Periods, Rate

HOUR_S = 3600
_SILENT_S = 5.0  # a gateway that was silent for so long has no part in what is still unused
_FORGOTTEN = 1e-3
_ALONE_S = 15.0
"""A gateway to which the store was silent for so long knows no longer what others ask for: more than control
takes to restart."""

_EQUALLY = 0.1  # of what is unused, for all gateways alike: the first requests need not wait

UsageKey = tuple[int, str, str, str, str, str]
"""Hour since 1970, tenant, key, model, adapter, class of work."""


class UsageRow(msgspec.Struct, array_like=True):
    """Of requests that have ended. errors: those that failed, or were cut off by the server. refused: of
    these, those that no engine has seen. cost: in nano-units.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    errors: int = 0
    refused: int = 0
    audio_seconds: int = 0
    cost: int = 0
    images: int = 0

    def add(self, prompt: int, cached: int, output: int, seconds: int, images: int, cost: int) -> None:
        """What requests took."""
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output
        self.audio_seconds += seconds
        self.images += images
        self.cost += cost

    def merge(self, other: UsageRow) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Settlement(msgspec.Struct, frozen=True):
    """What one process has counted since its last one.

    number: of the process's settlements, from 1. rates: by allowance, of requests and of tokens. totals_of:
    allowances whose totals the process needs; None for all. is_gateway: whether it shares limits with others.
    changes: of keys, that it has noticed: who, and what. webhook: "" for none. lines: of the rows' allowances
    that have a budget of money, the soft line, the most that it may take, and whether that refused a request.
    """

    source: str
    number: int
    rows: list[tuple[UsageKey, UsageRow]]
    rates: dict[str, tuple[Rate, Rate]] = {}
    totals_of: list[str] | None = None
    is_gateway: bool = True
    changes: list[tuple[str, str]] = []
    webhook: str = ""
    lines: dict[str, tuple[int, int, bool]] = {}


class Totals(msgspec.Struct, frozen=True):
    """What the store answers. tokens: by allowance, of the day and the month. gateways: how many there are.
    caps: by allowance, what the process may count of its limits for a minute. costs: of the month. served: by
    other gateways since the last answer: model, class, tenant and priced tokens. is_new: not all gateways may
    have reported yet.
    """

    periods: Periods
    tokens: dict[str, tuple[int, int]]
    gateways: int = 1
    caps: dict[str, tuple[int, int]] = {}
    costs: dict[str, int] = {}
    served: list[tuple[str, str, str, float]] = []
    is_new: bool = False


class UsageCounters:
    """Of one process."""

    def __init__(self, *, is_gateway: bool = True) -> None:
        self._is_gateway = is_gateway
        self.source = uuid.uuid4().hex
        self._rows: dict[UsageKey, UsageRow] = {}
        self.changes: list[tuple[str, str]] = []
        """Of keys: who, and what."""
        self.webhook = ""
        self._sent: Settlement | None = None
        self._number = 0
        self.knows = False
        """The totals of all allowances; not those of budgets that have just been added."""
        self._sums: dict[str, UsageRow] = {}  # of what was sent
        self._gateways = 1
        self._is_lost = False  # a store that knew of other gateways has not answered

    def row(self, tenant: str, key: str, model: str, adapter: str, tier: str, seconds: float) -> UsageRow:
        """To add to, now. seconds: since 1970."""
        name = int(seconds // HOUR_S), tenant, key, model, adapter, tier
        found = self._rows.get(name)
        if found is None:
            found = self._rows[name] = UsageRow()
        return found

    def sums(self) -> dict[str, UsageRow]:
        """By tenant, since the process began."""
        found = {tenant: copy(row) for tenant, row in self._sums.items()}
        self._sum_up(found)
        return found

    def _sum_up(self, sums: dict[str, UsageRow]) -> None:
        for key, row in self._rows.items():
            sums.setdefault(key[1], UsageRow()).merge(row)

    def settlement(self, allowances: Mapping[str, Allowance], now: float) -> Settlement:
        """What to send: the same again until `settled`. allowances: in this process."""
        if self._sent is not None:
            return self._sent
        self._sum_up(self._sums)
        rows, self._rows = self._rows, {}
        changes, self.changes = self.changes, []
        names = {name for key in rows for name in (key[1], f"{key[1]}/{key[2]}")} & allowances.keys()
        lines = dict[str, tuple[int, int, bool]]()
        for name in names:
            one = allowances[name]
            for budget in one.budgets:
                budget.send()
            if one.cost is not None and self.webhook:
                lines[name] = one.warns_at, one.cost.most, one.exhausted == one.cost.period
        found = ((name, one.rates(int(now))) for name, one in allowances.items() if one.is_limited)
        rates = {name: rates for name, rates in found if rates is not None}
        self._number += 1
        budgets = [name for name in {*rates, *names} if allowances[name].has_budget]
        self._sent = Settlement(
            self.source,
            self._number,
            list(rows.items()),
            rates,
            budgets if self.knows else None,
            self._is_gateway,
            changes,
            self.webhook,
            lines,
        )
        return self._sent

    def unanswered(self, seconds: float, allowances: Mapping[str, Allowance]) -> None:
        """The store was silent for so long. Each gateway then gets an equal part of every limit: those that
        had more give it up a window before the others take it.
        """
        self._is_lost = self._gateways > 1
        if seconds >= _ALONE_S:
            for one in allowances.values():
                one.share_equally(is_shrinking=seconds < _ALONE_S + WINDOW_S)

    def settled(self, totals: Totals, allowances: Mapping[str, Allowance]) -> None:
        """The store has the last settlement, and says this."""
        sent, self._sent = self._sent, None
        self.knows = self.knows or (sent is not None and sent.totals_of is None)
        for name, (day, month) in totals.tokens.items():
            if (one := allowances.get(name)) is not None:
                if one.day is not None:
                    one.day.settle(totals.periods.day, day)
                if one.month is not None:
                    one.month.settle(totals.periods.month, month)
                if one.cost is not None and name in totals.costs:
                    one.cost.settle(totals.periods.month, totals.costs[name])
        if self._is_lost and totals.is_new:
            return  # the parts stay
        for one in allowances.values():
            if one.gateways != totals.gateways or self._is_lost:
                one.share(totals.gateways, None)
        self._gateways, self._is_lost = totals.gateways, False
        for name in sent.rates if sent is not None else ():
            if (one := allowances.get(name)) is not None:
                one.share(totals.gateways, totals.caps.get(name))


@dataclass(slots=True)
class _Part:
    """What one gateway has reported of one limit, and was allowed. least: a request that waits for more than
    the gateway's part, since its `since`; 0 for none.
    """

    used: int = 0
    wanted: float = 0.0
    cap: int = 0
    least: int = 0
    since: float = 0.0


class Caps:
    """How gateways share limits for a minute: each may count what it has counted, and of the rest as much as
    its part of what was asked for. A request that is larger than such a part gets what it needs, once that is
    unused; the one that waits longest first, for which the others leave room. All caps of a limit together
    are the limit, at any moment; less, where gateways have counted more than that.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._heard: dict[str, float] = {}
        self._parts: dict[tuple[str, int], dict[str, _Part]] = {}

    @property
    def sources(self) -> set[str]:
        """Gateways that have reported in the last minute."""
        return {*self._heard}

    def is_new(self, now: float) -> bool:
        """Whether there may be gateways that have not reported yet."""
        self._began = now if self._began is None else self._began
        return now - self._began < _SILENT_S

    def report(self, settlement: Settlement, now: float) -> tuple[int, dict[str, tuple[int, int]]]:
        """How many gateways there are, and the caps of the one that has sent this."""
        me = settlement.source
        self._heard[me] = now
        for gone in [one for one, at in self._heard.items() if now - at > WINDOW_S]:
            del self._heard[gone]
            for parts in self._parts.values():
                parts.pop(gone, None)
        living = {one for one, at in self._heard.items() if now - at < _SILENT_S}
        caps: dict[str, tuple[int, int]] = {}
        for name, rates in settlement.rates.items():
            requests, tokens = (
                self._cap((name, kind), rate, me, living, now) for kind, rate in enumerate(rates)
            )
            if requests is not None or tokens is not None:
                caps[name] = requests or 0, tokens or 0
        return len(living), caps

    def _cap(self, limit: tuple[str, int], rate: Rate, me: str, living: set[str], now: float) -> int | None:
        """None for a gateway that has not used it for a while: others have its part."""
        parts = self._parts.setdefault(limit, {})
        mine = parts.setdefault(me, _Part())
        mine.used, mine.wanted = rate.used, mine.wanted / 2 + rate.asked
        if not rate.limit or (not mine.used and mine.wanted < _FORGOTTEN):
            del parts[me]
            if not parts:
                del self._parts[limit]
            return None
        wanted = sum(one.wanted for one in parts.values())
        equal = 1 / max(len(living), 1)
        asked = mine.wanted / wanted if wanted else equal  # 0: this control is new, and nobody has asked it
        share = _EQUALLY * equal + (1 - _EQUALLY) * asked
        others = [one for key, one in parts.items() if key != me]
        unused = rate.limit - rate.used - sum(one.used for one in others)
        free = rate.limit - rate.used - sum(max(one.used, one.cap) for one in others)
        if not mine.least:
            mine.since = now
        rest, left, owed = unused, free, 0  # by those that have waited longer
        for key, one in sorted(parts.items(), key=lambda part: part[1].since):
            if key not in living or not one.least or one.since >= mine.since:
                continue
            if one.least <= rest:
                rest -= one.least
                left -= max(0, one.least - max(0, one.cap - one.used))
            elif one.least <= 2 * rate.least:  # whose turn it is when that of this gateway is forgotten
                owed += one.least
        left = max(0, left)
        part = min(math.ceil(share * unused), left)
        if part < rate.least <= left:
            part = rate.least
        mine.least = rate.least if rate.least > part else 0
        mine.cap = max(0, rate.used + min(part, free) - owed)
        return mine.cap


class ServedElsewhere:
    """What gateways have served, kept for each of the others, whose turns it counts for, until it reports."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[tuple[str, str, str], float]] = {}

    def report(self, settlement: Settlement, sources: set[str]) -> list[tuple[str, str, str, float]]:
        """What others have served since the gateway's last report. sources: gateways that there are."""
        me = settlement.source
        for gone in self._kept.keys() - sources:
            del self._kept[gone]
        found = self._kept.get(me, {})
        self._kept[me] = {}
        for (_, tenant, _, model, _, tier), row in settlement.rows:
            amount = price(row.prompt_tokens, row.cached_tokens, row.output_tokens)
            for source, kept in self._kept.items():
                if source != me:
                    kept[model, tier, tenant] = kept.get((model, tier, tenant), 0.0) + amount
        return [(model, tier, tenant, amount) for (model, tier, tenant), amount in found.items()]
