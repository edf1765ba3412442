"""Limits of keys and tenants: what a request reserves when it begins, and what it is charged when it ends.

A request reserves before it is sent on, so open ones cannot overshoot together; the difference to what it
really took is returned, or charged, at its end, whatever that is. Units: tokens; `now` in seconds of a clock
that never goes back, `today` as `Periods`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.schema.tenants import LimitsConfig
from penstock.errors import Overloaded, QuotaExhausted, RateLimited

WINDOW_S = 60
_FIRST_GUESS = 256
"""Tokens of an answer, for a tenant that has had none."""

_WEIGHT = 0.1
"""Of the latest answer in a tenant's mean."""

_RESETS = [*(b"%ds" % seconds for seconds in range(WINDOW_S)), b"1m0s"]
_WINDOWS = (
    (b"requests", "requests_per_minute", "requests"),
    (b"tokens", "tokens_per_minute", "tokens"),
)
_SHORT_WAIT_S = 1
_UNTOLD = 0.03
"""Of a limit for a minute, what all gateways together may count that have not asked for a part of it."""


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """One limit for a minute, in one gateway: how much was counted, and asked for since the last report."""

    limit: int = 0
    used: int = 0
    asked: int = 0


class Periods(msgspec.Struct, frozen=True, array_like=True):
    """A day, and the month that it is in, by UTC: days and months since 1970. ends: in seconds since 1970."""

    day: int
    month: int
    day_ends: float
    month_ends: float

    @classmethod
    def at(cls, seconds: float) -> Periods:
        """seconds: since 1970."""
        day, (year, month, *_) = int(seconds // 86_400), time.gmtime(seconds)
        ends = days_before(year, month + 1)
        return cls(day, (year - 1970) * 12 + month - 1, (day + 1) * 86_400.0, ends * 86_400.0)

    @property
    def month_begins(self) -> float:
        return days_before(1970, self.month + 1) * 86_400.0


def days_before(year: int, month: int) -> int:
    """Days from 1970 to the first of a month, which may be above 12. Source: Howard Hinnant, civil days."""
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    year -= month <= 2
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5
    era, of_era = divmod(year, 400)
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468


class MinuteWindow:
    """What was counted in the last `WINDOW_S` seconds, by whole seconds."""

    __slots__ = ("_second", "_slots", "newest", "used")

    def __init__(self) -> None:
        self._slots = [0] * WINDOW_S
        self._second = 0
        self.newest = -WINDOW_S  # the second of the last count
        self.used = 0

    def move(self, second: int) -> None:
        """Forgets what is older than the window that ends with `second`."""
        gap = second - self._second
        if gap <= 0:
            return
        if not self.used or gap >= WINDOW_S:
            if self.used:
                self._slots = [0] * WINDOW_S
                self.used = 0
        else:
            slots = self._slots
            for old in range(self._second + 1, second + 1):
                self.used -= slots[old % WINDOW_S]
                slots[old % WINDOW_S] = 0
        self._second = second

    def add(self, count: int) -> None:
        self._slots[self._second % WINDOW_S] += count
        self.used += count
        self.newest = self._second

    def correct(self, second: int, difference: int) -> None:
        """What was counted in `second` was wrong by so much. What is too old to be returned is not."""
        if self._second - second < WINDOW_S:
            self._slots[second % WINDOW_S] += difference
            self.used += difference
        elif difference > 0:
            self.add(difference)

    def wait_s(self, excess: int) -> int:
        """Seconds until `excess` of what was counted is forgotten."""
        for second in range(self._second - WINDOW_S + 1, self._second + 1):
            excess -= self._slots[second % WINDOW_S]
            if excess <= 0:
                return second + WINDOW_S - self._second
        return WINDOW_S

    def reset_s(self) -> int:
        """Seconds until nothing is counted."""
        return max(0, self.newest + WINDOW_S - self._second) if self.used else 0


class Budget:
    """Tokens of one day or month: as the usage store knows them, and what it has not heard of."""

    __slots__ = ("_before", "_sent", "period", "reserved", "stored", "unsettled")

    def __init__(self) -> None:
        self.period = -1
        self.stored = self.unsettled = self._sent = self.reserved = 0
        self._before = (-1, 0, 0, 0)

    def used(self, period: int) -> int:
        """In this period, with what is reserved."""
        self._enter(period)
        return self.stored + self.unsettled + self.reserved

    def charge(self, period: int, tokens: int) -> None:
        self._enter(period)
        self.unsettled += tokens

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
        if period == self.period:
            return
        left = (self.period, self.stored, self.unsettled, self._sent)
        found = self._before if self._before[0] == period else (period, 0, 0, 0)
        self.period, self.stored, self.unsettled, self._sent = found
        self._before = left


class Allowance:
    """Counts of one key, or of one tenant. name: as of `KeyTable.allowances`.

    gateways: how many share its limits for a minute; caps: what this one may count in a minute, once known:
    requests and tokens. asked: both since they were last reported. answer_tokens: mean of its answers.
    """

    __slots__ = (
        *("answer_tokens", "asked", "caps", "day", "gateways", "limits", "month"),
        *("name", "open", "requests", "tokens"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.limits = LimitsConfig()
        self.gateways = 1
        self.caps: tuple[int, int] | None = None
        self.asked = [0, 0]
        self.open = 0
        self.answer_tokens = float(_FIRST_GUESS)
        self.requests: MinuteWindow | None = None
        self.tokens: MinuteWindow | None = None
        self.day, self.month = Budget(), Budget()

    @property
    def is_limited(self) -> bool:
        named = self.limits
        return named != LimitsConfig(max_tokens=named.max_tokens)

    @property
    def has_budget(self) -> bool:
        return self.limits.tokens_per_day is not None or self.limits.tokens_per_month is not None

    def cap(self, kind: int, most: int) -> int:
        """Of a limit for a minute, what this gateway may count. kind: 0 for requests, 1 for tokens."""
        if self.gateways == 1:
            return most
        return int(_UNTOLD * most) // self.gateways if self.caps is None else min(most, self.caps[kind])

    def refusal(self, tokens: int, second: int, today: Periods, seconds: float) -> Overloaded | None:
        """Why a request may not begin now, if so. tokens: that it would reserve. seconds: since 1970."""
        limits, name = self.limits, self.name
        if (most := limits.open_requests) is not None and self.open >= most:
            return RateLimited(
                f"'{name}' has {self.open} open requests, and may have {most}. Try again when one has ended.",
                retry_after_s=_SHORT_WAIT_S,
            )
        if (most := limits.requests_per_minute) is not None:
            window = self.requests = self.requests or MinuteWindow()
            window.move(second)
            if window.used and window.used + 1 > (cap := self.cap(0, most)):
                return _too_fast(name, "requests", most, cap, window, 1)
        if (most := limits.tokens_per_minute) is not None:
            window = self.tokens = self.tokens or MinuteWindow()
            window.move(second)
            if tokens > most:
                return RateLimited(
                    f"The request may take {tokens} tokens, and '{name}' may take {most} in a minute. "
                    "Shorten the prompt, or ask for fewer tokens.",
                    should_retry="false",
                )
            if window.used and window.used + tokens > (cap := self.cap(1, most)):
                return _too_fast(name, "tokens", most, cap, window, tokens)
        for what, most, budget, period, ends in (
            ("today", limits.tokens_per_day, self.day, today.day, today.day_ends),
            ("this month", limits.tokens_per_month, self.month, today.month, today.month_ends),
        ):
            if most is not None and (used := budget.used(period)) + tokens > most:
                return QuotaExhausted(
                    f"'{name}' has used {used} of its {most} tokens of {what}, and the request may take "
                    f"{tokens}. Its operator can raise the limit.",
                    retry_after_s=math.ceil(ends - seconds),
                    should_retry="false",
                )
        return None

    def report(self, second: int) -> tuple[Rate, Rate]:
        """What is counted of the limits for a minute, and was asked for since the last report."""
        found: list[Rate] = []
        for kind, (_, limit_of, window_of) in enumerate(_WINDOWS):
            window: MinuteWindow | None = getattr(self, window_of)
            if window is not None:
                window.move(second)
            found.append(
                Rate(getattr(self.limits, limit_of) or 0, window.used if window else 0, self.asked[kind])
            )
        self.asked = [0, 0]
        return found[0], found[1]

    def reserve(self, tokens: int) -> None:
        """After `refusal`, which has found nothing."""
        self.open += 1
        if self.requests is not None:
            self.requests.add(1)
        if self.tokens is not None:
            self.tokens.add(tokens)
        self.day.reserved += tokens
        self.month.reserved += tokens

    def settle(self, reserved: int, taken: int, begun: int, second: int, today: Periods) -> None:
        """A request has ended that began in the second `begun`."""
        self.open -= 1
        if self.tokens is not None:
            self.tokens.move(second)
            self.tokens.correct(begun, taken - reserved)
        self.day.reserved -= reserved
        self.month.reserved -= reserved
        if self.has_budget:
            self.charge(taken, today)

    def charge(self, taken: int, today: Periods) -> None:
        """Tokens that nothing was reserved for."""
        self.day.charge(today.day, taken)
        self.month.charge(today.month, taken)


def _too_fast(name: str, what: str, most: int, cap: int, window: MinuteWindow, more: int) -> RateLimited:
    """cap: below `most` where other gateways use the rest, which may change within a second."""
    excess = window.used + more - most
    wait_s = window.wait_s(excess) if excess > 0 else _SHORT_WAIT_S
    had = f"had {window.used}" if cap == most else f"had {window.used} here and the rest elsewhere"
    return RateLimited(
        f"'{name}' may have {most} {what} in a minute; it has {had}, and this would be {more} more. Try "
        f"again in {wait_s} s.",
        retry_after_s=wait_s,
    )


@dataclass(slots=True)
class Reservation:
    """What one open request has reserved. Settled once: later calls do nothing."""

    allowances: Sequence[Allowance]
    tokens: int
    begun: int
    is_open: bool = True

    @classmethod
    def make(
        cls, allowances: Sequence[Allowance], tokens: int, now: float, today: Periods, seconds: float
    ) -> Reservation:
        """With all allowances, or with none. Raises: RateLimited, QuotaExhausted."""
        second = int(now)
        for allowance in allowances:
            allowance.asked[0] += 1
            allowance.asked[1] += tokens
            if (refusal := allowance.refusal(tokens, second, today, seconds)) is not None:
                raise refusal
        for allowance in allowances:
            allowance.reserve(tokens)
        return cls(allowances, tokens, second)

    def settle(self, taken: int, now: float, today: Periods) -> None:
        """The request has ended, with so many tokens."""
        if self.is_open:
            self.is_open = False
            for allowance in self.allowances:
                allowance.settle(self.tokens, taken, self.begun, int(now), today)


def learn(allowance: Allowance, answer_tokens: int) -> None:
    """The tenant has had an answer of so many tokens."""
    allowance.answer_tokens += _WEIGHT * (answer_tokens - allowance.answer_tokens)


def headers(allowances: Sequence[Allowance], now: float) -> list[tuple[bytes, bytes]]:
    """OpenAI's `x-ratelimit-*`, of the allowances that have least left: what a refusal would go by."""
    fields: list[tuple[bytes, bytes]] = []
    for kind, (what, limit_of, window_of) in enumerate(_WINDOWS):
        least: tuple[int, int, int] | None = None
        for allowance in allowances:
            most = getattr(allowance.limits, limit_of)
            if most is not None:
                used = reset_s = 0
                if (window := getattr(allowance, window_of)) is not None:
                    window.move(int(now))
                    used, reset_s = window.used, window.reset_s()
                left = max(0, allowance.cap(kind, most) - used)
                if least is None or left < least[0]:
                    least = left, most, reset_s
        if least is not None:
            fields += [
                (b"x-ratelimit-limit-" + what, b"%d" % least[1]),
                (b"x-ratelimit-remaining-" + what, b"%d" % least[0]),
                (b"x-ratelimit-reset-" + what, _RESETS[least[2]]),
            ]
    return fields
