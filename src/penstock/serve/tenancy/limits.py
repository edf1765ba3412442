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

import msgspec

from penstock.config.schema.tenants import LimitsConfig
from penstock.errors import Overloaded, QuotaExhausted, RateLimited
from penstock.serve.tenancy.prices import nano, shown

log = logging.getLogger(__name__)

WINDOW_S, DAY_S = 60, 86_400.0
_FIRST_GUESS = 256
"""Tokens of an answer, for a tenant that has had none."""

_WEIGHT = 0.1
"""Of the latest answer in a tenant's mean."""

_UNTOLD = 0.03
"""Of a limit for a minute, what all gateways together may count that have not asked for a part of it."""

_SHORT_WAIT_S = 1
NO_LIMIT = 1 << 62
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
    """One limit for a minute, in one gateway: how much was counted, and asked for since the last report.
    least: the smallest request that was refused since then; 0 where none was.
    """

    limit: int = 0
    used: int = 0
    asked: int = 0
    least: int = 0


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
        day, (year, month, *_) = int(seconds // DAY_S), time.gmtime(seconds)
        begins = calendar.timegm((year, month, 1, 0, 0, 0))
        ends = calendar.timegm((year + month // 12, month % 12 + 1, 1, 0, 0, 0))
        return cls(day, (year - 1970) * 12 + month - 1, (day + 1) * DAY_S, begins, ends)


class MinuteLimit:
    """What requests reserve of one kind, and of this the last `WINDOW_S` seconds, by whole ones. most: the
    limit. kind: an index of `_WHAT`.

    reserved: in all; ended: of this, by requests that have ended; taken: what they took in its place.
    forgotten: what of `reserved` the last minute does not have. room: `reserved` up to which this gateway's
    part of the limit goes; sure: up to which no limit or budget needs a look. first: the largest request that
    fits whatever the part is, where the last minute had none.
    """

    __slots__ = (
        *("_due", "_least", "_reported", "counts", "ended", "field", "first", "forgotten", "kind", "mark"),
        *("most", "refused", "reserved", "room", "second", "sure", "taken"),
    )

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.most = self.room = NO_LIMIT
        self.first = self._least = 0
        self.field: Field = (b"", b"")  # of the limit
        self.reserved = self.ended = self.taken = self.forgotten = 0
        self.refused = self._reported = self.sure = 0
        self.counts: dict[int, int] = {}  # by second before this one, in their order
        self._due = NO_LIMIT  # second in which the oldest of them is forgotten
        self.second = -1
        self.mark = 0  # `reserved` when it began

    @property
    def used(self) -> int:
        """In the last minute."""
        return self.reserved - self.forgotten

    @property
    def open(self) -> int:
        """Reserved by requests that have not ended."""
        return self.reserved - self.ended

    def move(self, second: int) -> None:
        """Begins this second, and forgets what is older than the window that ends with it: without a limit,
        all that was before.
        """
        if second != self.second:
            count = self.reserved - self.mark
            if self.most == NO_LIMIT:
                self.forgotten += count
                self.room += count
            elif count:
                if not self.counts:
                    self._due = self.second + WINDOW_S
                self.counts[self.second] = count
            self.mark, self.second = self.reserved, second
        while second >= self._due:
            count = self.counts.pop(self._due - WINDOW_S)
            self.forgotten += count
            self.room += count
            self._due = next(iter(self.counts), NO_LIMIT) + WINDOW_S

    def fits(self, count: int) -> bool:
        return self.reserved + count <= self.room or (not self.used and count <= self.first)

    def refuse(self, count: int) -> None:
        """So much was asked for, and does not fit."""
        self.refused += count
        self._least = min(self._least or count, count)

    def correct(self, begun: int, difference: int) -> None:
        """What was counted in the second `begun` was wrong by so much. What is too old is not returned."""
        if begun in self.counts:
            self.counts[begun] += difference
        elif begun == self.second or difference > 0:
            self.mark -= difference
        else:
            return
        self.forgotten -= difference
        self.room -= difference
        self.sure -= difference

    def wait_s(self, excess: int, second: int) -> int:
        """Seconds until `excess` of what was counted is forgotten."""
        for counted, count in self.counts.items():
            excess -= count
            if excess <= 0:
                return counted + WINDOW_S - second
        return WINDOW_S

    def headers(self, second: int) -> tuple[Field, Field, Field]:
        """What this gateway may still count, and the seconds until all that was counted is forgotten."""
        left, kind, reset_s = self.room - self.reserved, self.kind, WINDOW_S
        if self.reserved == self.mark:
            reset_s = next(reversed(self.counts)) + WINDOW_S - second if self.counts else 0
        return self.field, (_REMAINING[kind], b"%d" % left if left > 0 else b"0"), _RESETS[kind][reset_s]

    def report(self, second: int) -> Rate:
        self.move(second)
        asked = self.reserved + self.refused - self._reported
        self._reported += asked
        least, self._least = self._least, 0
        return Rate(self.most, self.used, asked, least) if self.most < NO_LIMIT else Rate()

    def refusal(self, name: str, count: int, second: int) -> RateLimited:
        """Where the others use the rest, that may change within a second."""
        what, excess = _WHAT[self.kind], self.used + count - self.most
        wait_s = self.wait_s(excess, second) if excess > 0 else _SHORT_WAIT_S
        had = (
            f"{self.used}"
            if self.room - self.forgotten == self.most
            else f"{self.used} here and the rest elsewhere"
        )
        return RateLimited(
            f"'{name}' may have {self.most} {what} in a minute; it has had {had}, and this would be {count} "
            f"more. Try again in {wait_s} s.",
            retry_after_s=wait_s,
        )


class Budget:
    """Tokens, or nano-units of money, of one day or month: as the usage store knows them, and what it has not
    heard of. counted: what requests reserve, and took.
    """

    __slots__ = ("_before", "_counted", "_known", "_sent", "most", "period", "stored")

    def __init__(self, counted: MinuteLimit) -> None:
        self.most = NO_LIMIT
        self.period = -1
        self.stored = self._sent = 0
        self._counted, self._known = counted, counted.taken  # of what was taken, what this does not count
        self._before = (-1, 0, 0, 0)

    @property
    def unsettled(self) -> int:
        """What requests took that the store may not have."""
        return self._counted.taken - self._known

    def used(self, period: int) -> int:
        """In this period, with what is reserved."""
        if period != self.period:
            self.enter(period)
        return self.spent + self._counted.open

    @property
    def spent(self) -> int:
        """In the last period that was asked for, without what is reserved."""
        return self.stored + self.unsettled

    def send(self) -> None:
        """All that was charged is on its way to the store."""
        self._sent = self.unsettled

    def settle(self, period: int, total: int) -> None:
        """The store has what was sent; all gateways together had `total` in this period."""
        if period > self.period:
            self.enter(period)
        if period == self.period:
            self._counted.sure -= max(0, total - self.stored - self._sent)
            self.stored = total
            self._known += self._sent
        self._sent = 0

    def enter(self, period: int) -> None:
        """A clock that is set back leads to the period before, as it was left."""
        if period == self.period:
            return
        left = (self.period, self.stored, self.unsettled, self._sent)
        found = self._before if self._before[0] == period else (period, 0, 0, 0)
        self.period, self.stored, unsettled, self._sent = found
        self._known = self._counted.taken - unsettled
        self._before = left
        self._counted.sure = 0


class Allowance:
    """What one key, or one tenant, may still take. name: `tenant` or `tenant/key`. What has no limit is not
    counted. answer_tokens: mean of its answers. weight: of a tenant where requests wait.
    """

    __slots__ = (
        *("answer_tokens", "cost", "costs", "day", "exhausted", "gateways", "is_shared", "month"),
        *("most_open", "name", "requests", "today", "tokens", "warned", "warns_at", "weight"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer_tokens = float(_FIRST_GUESS)
        self.most_open = NO_LIMIT
        self.requests, self.tokens, self.costs = MinuteLimit(0), MinuteLimit(1), MinuteLimit(2)
        self.day: Budget | None = None
        self.month: Budget | None = None
        self.cost: Budget | None = None  # of a month
        self.today: Periods | None = None
        self.warns_at, self.warned = NO_LIMIT, -1  # the soft line, and the month in which it was logged
        self.exhausted = -1  # the month in which its budget of money has refused a request
        self.is_shared = False  # this gateway has been told its caps
        self.gateways = 1
        self.weight = 1.0

    @property
    def open(self) -> int:
        """Requests."""
        return self.requests.open

    def limit(self, limits: LimitsConfig) -> None:
        """Sets limits; what was counted stays, and so do caps of limits that have not changed."""
        before = self.requests.most, self.tokens.most
        self.most_open = limits.open_requests or NO_LIMIT
        self.requests.most = limits.requests_per_minute or NO_LIMIT
        self.tokens.most = limits.tokens_per_minute or NO_LIMIT
        self.day = _limited(self.day or Budget(self.tokens), limits.tokens_per_day)
        self.month = _limited(self.month or Budget(self.tokens), limits.tokens_per_month)
        most, soft = limits.cost_per_month, limits.warn_cost_per_month
        has_none = most is None and soft is None
        least = 0 if most is None else max(1, nano(most))  # 0 is no limit
        self.cost = _limited(self.cost or Budget(self.costs), None if has_none else least)
        self.warns_at = NO_LIMIT if soft is None else nano(soft)
        self.today, self.exhausted = None, -1
        if (self.requests.most, self.tokens.most) != before:
            self.share(self.gateways, None)
        self._look()

    def _look(self) -> None:
        """Has the next request looked at: less may fit than before."""
        self.requests.sure = self.tokens.sure = self.costs.sure = 0

    @property
    def is_limited(self) -> bool:
        minute = min(self.requests.most, self.tokens.most, self.most_open)
        return self.has_budget or minute < NO_LIMIT

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
        for one in (self.requests, self.tokens):
            one.field = (f"x-ratelimit-limit-{_WHAT[one.kind]}".encode(), b"%d" % one.most)
            part = one.most
            if one.most < NO_LIMIT and (caps is not None or gateways > 1):
                untold = int(_UNTOLD * one.most) // gateways
                part = untold if caps is None else min(one.most, caps[one.kind])
            one.room = one.forgotten + part
            one.first = one.most if caps is None else 0
        self._look()

    def share_equally(self, *, is_shrinking: bool) -> None:
        """Without the store. is_shrinking: a part that is smaller stays, for others have the rest."""
        for one in (self.requests, self.tokens):
            if one.most < NO_LIMIT and self.gateways > 1:
                part, had = max(1, one.most // self.gateways), one.room - one.forgotten
                one.room = one.forgotten + (min(part, had) if is_shrinking else part)
                one.first = one.first if is_shrinking else one.most
        self._look()

    def rates(self, second: int) -> tuple[Rate, Rate] | None:
        """What is counted of the limits for a minute; None where nothing is, and was asked for."""
        found = self.requests.report(second), self.tokens.report(second)
        return found if self.is_shared or found[0].asked or found[1].asked else None

    def move(self, second: int, today: Periods) -> None:
        """It is this second of this day."""
        self.requests.move(second)
        self.tokens.move(second)
        if today is not self.today:
            self.today = today
            if self.day is not None:
                self.day.enter(today.day)
            for budget in (self.month, self.cost):
                if budget is not None:
                    budget.enter(today.month)

    def fits(self, tokens: int, cost: int, second: int, today: Periods, *, free: bool = False) -> bool:
        """Whether a request that begins now may reserve so much. Finds how much more surely fits. free: it
        fits whatever tokens and money are left.
        """
        self.move(second, today)
        requests, counted, costs = self.requests, self.tokens, self.costs
        left, money = NO_LIMIT, NO_LIMIT
        if self.day is not None:
            left = self.day.most - self.day.used(today.day)
        if self.month is not None:
            left = min(left, self.month.most - self.month.used(today.month))
        if self.cost is not None:
            money = self.cost.most - self.cost.used(today.month)
        if requests.open >= self.most_open or (not free and (tokens > left or cost > money)):
            return False
        if not requests.fits(1):
            requests.refuse(1)
            return False
        if not (free or counted.fits(tokens)):
            requests.refused += 1
            counted.refuse(tokens)
            return False
        requests.sure = min(requests.room, self.most_open + requests.ended)
        counted.sure = min(counted.room, counted.reserved + left)
        costs.sure = costs.reserved + money
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
            if not limit.fits(count):
                return limit.refusal(self.name, count, second)
        month, month_ends = today.month, today.month_ends
        for what, budget, wanted, period, ends, say in (
            ("tokens of today", self.day, tokens, today.day, today.day_ends, str),
            ("tokens of this month", self.month, tokens, month, month_ends, str),
            ("budget of this month", self.cost, cost, month, month_ends, shown),
        ):
            if budget is not None and (used := budget.used(period)) + wanted > budget.most:
                if budget is self.cost:
                    self.exhausted = month
                return QuotaExhausted(
                    f"'{self.name}' has used {say(used)} of its {say(budget.most)} {what}, and the request "
                    f"may take {say(wanted)}. Its operator can raise the limit.",
                    retry_after_s=math.ceil(ends - seconds),
                    should_retry="false",
                )
        raise AssertionError("nothing refuses the request")

    def spend(self, tokens: int, cost: int, second: int, today: Periods) -> bool:
        """Charges what was not reserved. Returns whether a budget is used up."""
        self.move(second, today)
        for counted, amount in ((self.tokens, tokens), (self.costs, cost)):
            counted.reserved += amount
            counted.ended += amount
            counted.taken += amount
        self.warn(today.month)
        return any(one.used(one.period) >= one.most for one in self.budgets)

    def warn(self, month: int) -> None:
        """Logs once a month that the soft line was reached."""
        if self.cost is not None and self.warned != month and (spent := self.cost.spent) >= self.warns_at:
            self.warned = month
            log.warning(
                "'%s' has spent %s this month, its soft line is %s.",
                *(self.name, shown(spent), shown(self.warns_at)),
            )

    def learn(self, answer_tokens: int) -> None:
        """It has had an answer of so many tokens."""
        self.answer_tokens += _WEIGHT * (answer_tokens - self.answer_tokens)


def _amount(cost: int) -> str:
    return f"a cost of {shown(cost)}"


def _limited(budget: Budget, most: int | None) -> Budget | None:
    budget.most = most or NO_LIMIT
    return None if most is None else budget


def reserve(
    allowances: Sequence[Allowance],
    tokens: int,
    second: int,
    today: Periods,
    seconds: float,
    cost: int = 0,
    *,
    free: bool = False,
) -> None:
    """With all allowances, or with none. cost: in nano-units. free: for a request that takes neither tokens
    nor money: only limits of requests refuse it. Raises: RateLimited, QuotaExhausted.
    """
    for one in allowances:
        requests, counted = one.requests, one.tokens
        number, amount = requests.reserved + 1, counted.reserved + tokens
        if second != requests.second:
            one.move(second, today)
        if (
            number > requests.sure
            or amount > counted.sure
            or (one.cost is not None and one.costs.reserved + cost > one.costs.sure)
        ) and not one.fits(tokens, cost, second, today, free=free):
            begun = allowances[: allowances.index(one)]
            settle(begun, (tokens, cost), (0, 0), second, second, today)
            for other in begun:
                other.requests.correct(second, -1)
            raise one.refusal(tokens, cost, second, today, seconds)
        requests.reserved, counted.reserved = number, amount
        one.costs.reserved += cost


def settle(
    allowances: Sequence[Allowance],
    reserved: tuple[int, int],
    taken: tuple[int, int],
    begun: int,
    second: int,
    today: Periods,
) -> None:
    """A request has ended that began in the second `begun`. reserved, taken: tokens and their cost."""
    tokens, took = reserved[0], taken[0]
    for one in allowances:
        counted = one.tokens
        if second != counted.second or today is not one.today:
            one.move(second, today)
        one.requests.ended += 1
        counted.ended += tokens
        counted.taken += took
        if took != tokens:
            counted.correct(begun, took - tokens)
        costs = one.costs  # also without a budget: one may come, or have been there, while requests are open
        costs.ended += reserved[1]
        costs.taken += taken[1]
        costs.sure -= taken[1] - reserved[1]
        if one.warns_at < NO_LIMIT:
            one.warn(today.month)


def headers(allowances: Sequence[Allowance], second: int) -> list[Field]:
    """OpenAI's `x-ratelimit-*`, of the allowances that have least left: what a refusal would go by. Budgets
    above their soft lines.
    """
    requests: MinuteLimit | None = None
    tokens: MinuteLimit | None = None
    warns = False
    fewest = least = NO_LIMIT >> 1
    for one in allowances:
        limit = one.requests
        if second != limit.second:
            limit.move(second)
            one.tokens.move(second)
        if (left := limit.room - limit.reserved) < fewest:
            fewest, requests = left, limit
        limit = one.tokens
        if (left := limit.room - limit.reserved) < least:
            least, tokens = left, limit
        warns = warns or one.warns_at < NO_LIMIT
    fields = [*requests.headers(second)] if requests is not None else []
    if tokens is not None:
        fields += tokens.headers(second)
    for one in allowances if warns else ():
        if one.warns_at < NO_LIMIT and one.cost is not None and (spent := one.cost.spent) >= one.warns_at:
            most = f"; limit={shown(one.cost.most)}" if one.cost.most < NO_LIMIT else ""
            text = f"{one.name}; spent={shown(spent)}; soft={shown(one.warns_at)}{most}"
            fields.append((_BUDGET, text.encode()))
    return fields
