"""Limits of keys and tenants: what a request reserves when it begins, and what it is charged when it ends.

A request reserves before it is sent on, so open ones cannot overshoot together; the difference to what it
really took is returned, or charged, at its end, whatever that is. Units: tokens; `second` of a clock that
never goes back, `today` as `Periods`.
"""

from __future__ import annotations

import calendar
import logging
import math
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from penstock.config.schema.tenants import LimitsConfig
from penstock.errors import Overloaded, QuotaExhausted, RateLimited
from penstock.serve.tenancy.prices import nano, shown

log = logging.getLogger(__name__)

WINDOW_S = 60
_FIRST_GUESS = 256
"""Tokens of an answer, for a tenant that has had none."""

_WEIGHT = 0.1
"""Of the latest answer in a tenant's mean."""

_UNTOLD = 0.03
"""Of a limit for a minute, what all gateways together may count that have not asked for a part of it."""

_SHORT_WAIT_S = 1
_NO_LIMIT = _NEVER = 1 << 62
_WHAT = ("requests", "tokens")
_REMAINING = [f"x-ratelimit-remaining-{what}".encode() for what in _WHAT]
_RESETS = [
    [
        (f"x-ratelimit-reset-{what}".encode(), b"1m0s" if seconds == WINDOW_S else b"%ds" % seconds)
        for seconds in range(WINDOW_S + 1)
    ]
    for what in _WHAT
]

_BUDGET = b"x-penstock-budget"

Field = tuple[bytes, bytes]
"""Of a header."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """One limit for a minute, in one gateway: how much was counted, and asked for since the last report."""

    limit: int = 0
    used: int = 0
    asked: int = 0


class Periods(msgspec.Struct, frozen=True, array_like=True):
    """A day and its month, by UTC: both since 1970. The others in seconds since then."""

    day: int
    month: int
    day_ends: float
    month_begins: float
    month_ends: float

    @classmethod
    def at(cls, seconds: float) -> Periods:
        """seconds: since 1970."""
        day, (year, month, *_) = int(seconds // 86_400), time.gmtime(seconds)
        begins = calendar.timegm((year, month, 1, 0, 0, 0))
        ends = calendar.timegm((year + month // 12, month % 12 + 1, 1, 0, 0, 0))
        return cls(day, (year - 1970) * 12 + month - 1, (day + 1) * 86_400.0, begins, ends)


class MinuteLimit:
    """Counts what the last `WINDOW_S` seconds had, by whole seconds. most: the limit; cap: what this gateway
    may count of it. asked: since the last report. kind: 0 for requests, 1 for tokens.
    """

    __slots__ = ("_counts", "_oldest", "asked", "cap", "field", "kind", "most", "used")

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.most = self.cap = _NO_LIMIT
        self.field: Field = (b"", b"")  # of the limit
        self.asked = self.used = 0
        self._counts: dict[int, int] = {}  # by second, in their order
        self._oldest = _NEVER  # second with a count

    def move(self, second: int) -> None:
        """Forgets what is older than the window that ends with `second`."""
        while second - self._oldest >= WINDOW_S:
            self.used -= self._counts.pop(self._oldest)
            self._oldest = next(iter(self._counts), _NEVER)

    def fits(self, count: int) -> bool:
        """What is more than the gateway's cap fits into an empty window."""
        return self.used + count <= self.cap or (not self.used and count <= self.most)

    def take(self, count: int, second: int) -> bool:
        """Counts it, if it fits."""
        if second - self._oldest >= WINDOW_S:
            self.move(second)
        self.asked += count
        used = self.used + count
        if used > self.cap and not self.fits(count):
            return False
        self.used = used
        if second in self._counts:
            self._counts[second] += count
        else:
            self._oldest = min(self._oldest, second)
            self._counts[second] = count
        return True

    def add(self, count: int, second: int) -> None:
        counts = self._counts
        if not counts:
            self._oldest = second
        counts[second] = counts.get(second, 0) + count
        self.used += count

    def correct(self, begun: int, difference: int, second: int) -> None:
        """What was counted in the second `begun` was wrong by so much. What is too old is not returned."""
        if second - self._oldest >= WINDOW_S:
            self.move(second)
        if begun in self._counts:
            self._counts[begun] += difference
            self.used += difference
        elif difference > 0:
            self.add(difference, second)

    def wait_s(self, excess: int, second: int) -> int:
        """Seconds until `excess` of what was counted is forgotten."""
        for counted, count in self._counts.items():
            excess -= count
            if excess <= 0:
                return counted + WINDOW_S - second
        return WINDOW_S

    def tighter(self, other: MinuteLimit | None, second: int) -> MinuteLimit:
        """The one of them of which this gateway may count less."""
        if second - self._oldest >= WINDOW_S:
            self.move(second)
        return self if other is None or self.cap - self.used < other.cap - other.used else other

    def headers(self, second: int) -> tuple[Field, Field, Field]:
        """What this gateway may still count, and the seconds until all that was counted is forgotten."""
        left, kind = self.cap - self.used, self.kind
        reset_s = next(reversed(self._counts)) + WINDOW_S - second if self.used else 0
        return self.field, (_REMAINING[kind], b"%d" % left if left > 0 else b"0"), _RESETS[kind][reset_s]

    def report(self, second: int) -> Rate:
        self.move(second)
        asked, self.asked = self.asked, 0
        return Rate(self.most, self.used, asked)

    def refusal(self, name: str, count: int, second: int) -> RateLimited:
        """Where the others use the rest, that may change within a second."""
        what, excess = _WHAT[self.kind], self.used + count - self.most
        wait_s = self.wait_s(excess, second) if excess > 0 else _SHORT_WAIT_S
        had = f"{self.used}" if self.cap == self.most else f"{self.used} here and the rest elsewhere"
        return RateLimited(
            f"'{name}' may have {self.most} {what} in a minute; it has had {had}, and this would be {count} "
            f"more. Try again in {wait_s} s.",
            retry_after_s=wait_s,
        )


class Budget:
    """Tokens, or nano-units of money, of one day or month: as the usage store knows them, and what it has not
    heard of.
    """

    __slots__ = ("_before", "_sent", "most", "period", "reserved", "stored", "unsettled")

    def __init__(self) -> None:
        self.most = _NO_LIMIT
        self.period = -1
        self.stored = self.unsettled = self._sent = self.reserved = 0
        self._before = (-1, 0, 0, 0)

    def used(self, period: int) -> int:
        """In this period, with what is reserved."""
        if period != self.period:
            self._enter(period)
        return self.stored + self.unsettled + self.reserved

    @property
    def spent(self) -> int:
        """In the last period that was asked for, without what is reserved."""
        return self.stored + self.unsettled

    def charge(self, period: int, reserved: int, taken: int) -> None:
        if period != self.period:
            self._enter(period)
        self.reserved = max(0, self.reserved - reserved)  # it may not have had a limit then
        self.unsettled += taken

    def send(self) -> None:
        """All that was charged is on its way to the store."""
        self._sent = self.unsettled

    def settle(self, period: int, total: int) -> None:
        """The store has what was sent; all gateways together had `total` in this period."""
        if period > self.period:
            self._enter(period)
        if period == self.period:
            self.stored, self.unsettled = total, self.unsettled - self._sent
        self._sent = 0

    def _enter(self, period: int) -> None:
        """A clock that is set back leads to the period before, as it was left."""
        left = (self.period, self.stored, self.unsettled, self._sent)
        found = self._before if self._before[0] == period else (period, 0, 0, 0)
        self.period, self.stored, self.unsettled, self._sent = found
        self._before = left


class Allowance:
    """What one key, or one tenant, may still take. name: `tenant` or `tenant/key`. What has no limit is not
    counted. answer_tokens: mean of its answers. weight: of a tenant where requests wait.
    """

    __slots__ = (
        *("answer_tokens", "cost", "day", "gateways", "is_shared", "most_open", "month", "name", "open"),
        *("requests", "tokens", "warned", "warns_at", "weight"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer_tokens = float(_FIRST_GUESS)
        self.open, self.most_open = 0, _NO_LIMIT
        self.requests: MinuteLimit | None = None
        self.tokens: MinuteLimit | None = None
        self.day: Budget | None = None
        self.month: Budget | None = None
        self.cost: Budget | None = None  # of a month
        self.warns_at, self.warned = _NO_LIMIT, -1  # the soft line, and the month in which it was logged
        self.is_shared = False  # this gateway has been told its caps
        self.gateways = 1
        self.weight = 1.0

    def limit(self, limits: LimitsConfig) -> None:
        """Sets limits; what was counted stays, and so do caps of limits that have not changed."""
        before = self._minutes()
        self.most_open = limits.open_requests or _NO_LIMIT
        self.requests = _limited(self.requests or MinuteLimit(0), limits.requests_per_minute)
        self.tokens = _limited(self.tokens or MinuteLimit(1), limits.tokens_per_minute)
        self.day = _limited(self.day or Budget(), limits.tokens_per_day)
        self.month = _limited(self.month or Budget(), limits.tokens_per_month)
        most, soft = limits.cost_per_month, limits.warn_cost_per_month
        has_none = most is None and soft is None
        self.cost = _limited(self.cost or Budget(), None if has_none else nano(most or 0))
        self.warns_at = _NO_LIMIT if soft is None else nano(soft)
        if self._minutes() != before:
            self.share(self.gateways, None)

    def _minutes(self) -> list[int | None]:
        """The limits for a minute."""
        return [None if one is None else one.most for one in (self.requests, self.tokens)]

    @property
    def is_limited(self) -> bool:
        return self.has_budget or self.most_open < _NO_LIMIT or bool(self.requests or self.tokens)

    @property
    def has_budget(self) -> bool:
        return self.day is not None or self.month is not None or self.cost is not None

    @property
    def budgets(self) -> list[Budget]:
        return [one for one in (self.day, self.month, self.cost) if one is not None]

    def share(self, gateways: int, caps: tuple[int, int] | None) -> None:
        """So many gateways keep the limits for a minute together. caps: of requests and tokens; None for a
        gateway that has not asked for a part.
        """
        self.gateways, self.is_shared = gateways, caps is not None
        for one in filter(None, (self.requests, self.tokens)):
            one.field = (f"x-ratelimit-limit-{_WHAT[one.kind]}".encode(), b"%d" % one.most)
            untold = one.most if gateways == 1 else int(_UNTOLD * one.most) // gateways
            one.cap = untold if caps is None else min(one.most, caps[one.kind])

    def rates(self, second: int) -> tuple[Rate, Rate] | None:
        """What is counted of the limits for a minute; None where nothing is, and was asked for."""
        found = [Rate() if one is None else one.report(second) for one in (self.requests, self.tokens)]
        return (found[0], found[1]) if self.is_shared or found[0].asked or found[1].asked else None

    def reserve(self, tokens: int, cost: int, second: int, today: Periods) -> bool:
        """Reserves so much for a request that begins now; False where that does not fit."""
        if (
            self.open >= self.most_open
            or ((one := self.day) is not None and one.used(today.day) + tokens > one.most)
            or ((one := self.month) is not None and one.used(today.month) + tokens > one.most)
            or ((one := self.cost) is not None and one.used(today.month) + cost > one.most)
            or (self.requests is not None and not self.requests.take(1, second))
        ):
            return False
        if self.tokens is not None and not self.tokens.take(tokens, second):
            if self.requests is not None:
                self.requests.correct(second, -1, second)
            return False
        self.open += 1
        if self.day is not None:
            self.day.reserved += tokens
        if self.month is not None:
            self.month.reserved += tokens
        if self.cost is not None:
            self.cost.reserved += cost
        return True

    def refusal(self, tokens: int, cost: int, second: int, today: Periods, seconds: float) -> Overloaded:
        """Why it may not. seconds: since 1970."""
        if self.open >= self.most_open:
            return RateLimited(
                f"'{self.name}' has {self.open} open requests, and may have {self.most_open}. Try again "
                "when one has ended.",
                retry_after_s=_SHORT_WAIT_S,
            )
        for span, one, most, say in (
            ("a minute", self.tokens, tokens, "{} tokens".format),
            ("a day", self.day, tokens, "{} tokens".format),
            ("a month", self.month, tokens, "{} tokens".format),
            ("a month", self.cost, cost, _amount),
        ):
            if one is not None and most > one.most:
                return RateLimited(
                    f"The request may come to {say(most)}, and '{self.name}' may have {say(one.most)} "
                    f"{span}: it can never run. Shorten the prompt, or ask for fewer tokens (max_tokens).",
                    should_retry="false",
                )
        for limit, count in ((self.requests, 1), (self.tokens, tokens)):
            if limit is not None and not limit.fits(count):
                return limit.refusal(self.name, count, second)
        month, month_ends = today.month, today.month_ends
        for what, budget, wanted, period, ends, say in (
            ("tokens of today", self.day, tokens, today.day, today.day_ends, str),
            ("tokens of this month", self.month, tokens, month, month_ends, str),
            ("budget of this month", self.cost, cost, month, month_ends, shown),
        ):
            if budget is not None and (used := budget.used(period)) + wanted > budget.most:
                return QuotaExhausted(
                    f"'{self.name}' has used {say(used)} of its {say(budget.most)} {what}, and the request "
                    f"may take {say(wanted)}. Its operator can raise the limit.",
                    retry_after_s=math.ceil(ends - seconds),
                    should_retry="false",
                )
        raise AssertionError("nothing refuses the request")

    def settle(
        self, reserved: tuple[int, int], taken: tuple[int, int], begun: int, second: int, today: Periods
    ) -> None:
        """A request has ended that began in the second `begun`. reserved, taken: tokens and their cost."""
        self.open -= 1
        if self.tokens is not None:
            self.tokens.correct(begun, taken[0] - reserved[0], second)
        if self.day is not None:
            self.day.charge(today.day, reserved[0], taken[0])
        if self.month is not None:
            self.month.charge(today.month, reserved[0], taken[0])
        if self.cost is not None:
            self.cost.charge(today.month, reserved[1], taken[1])
            if self.warned != today.month and (spent := self.cost.spent) >= self.warns_at:
                self.warned = today.month
                log.warning(
                    "'%s' has spent %s this month, its soft line is %s.",
                    *(self.name, shown(spent), shown(self.warns_at)),
                )

    def learn(self, answer_tokens: int) -> None:
        """It has had an answer of so many tokens."""
        self.answer_tokens += _WEIGHT * (answer_tokens - self.answer_tokens)


def _amount(cost: int) -> str:
    return f"a cost of {shown(cost)}"


_Counter = TypeVar("_Counter", MinuteLimit, Budget)


def _limited(counter: _Counter, most: int | None) -> _Counter | None:
    counter.most = most or _NO_LIMIT
    return None if most is None else counter


def reserve(
    allowances: Sequence[Allowance], tokens: int, second: int, today: Periods, seconds: float, cost: int = 0
) -> None:
    """With all allowances, or with none. cost: in nano-units. Raises: RateLimited, QuotaExhausted."""
    for number, one in enumerate(allowances):
        if not one.reserve(tokens, cost, second, today):
            for other in allowances[:number]:
                other.settle((tokens, cost), (0, 0), second, second, today)
                if other.requests is not None:
                    other.requests.correct(second, -1, second)
            raise one.refusal(tokens, cost, second, today, seconds)


def headers(allowances: Sequence[Allowance], second: int) -> list[Field]:
    """OpenAI's `x-ratelimit-*`, of the allowances that have least left: what a refusal would go by. Budgets
    above their soft lines.
    """
    requests = tokens = None
    for one in allowances:
        if one.requests is not None:
            requests = one.requests.tighter(requests, second)
        if one.tokens is not None:
            tokens = one.tokens.tighter(tokens, second)
    fields = [] if requests is None else [*requests.headers(second)]
    if tokens is not None:
        fields += tokens.headers(second)
    for one in allowances:
        if one.warns_at < _NO_LIMIT and one.cost is not None and (spent := one.cost.spent) >= one.warns_at:
            most = f"; limit={shown(one.cost.most)}" if one.cost.most < _NO_LIMIT else ""
            text = f"{one.name}; spent={shown(spent)}; soft={shown(one.warns_at)}{most}"
            fields.append((_BUDGET, text.encode()))
    return fields
