"""How long prompts and answers are to be: one number, a range, or a distribution.

512                   always 512
256-1024              evenly between
normal:512:0.3        mean and coefficient of variation (standard deviation by mean)
lognormal:512:0.8     the same, with the long tail of real traffic
"""

import math
import re
from dataclasses import dataclass
from random import Random
from typing import Self

from penstock.errors import ConfigError

_FORMS = "512, 256-1024, normal:512:0.3 or lognormal:512:0.8"
_RANGE = re.compile(r"(\d+)-(\d+)")
_SPREAD = re.compile(r"(normal|lognormal):(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths, in tokens. kind: `even` between low and high, or `normal`, `lognormal`."""

    kind: str
    low: float
    high: float

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Raises: ConfigError that names `option`."""
        found: Self | None = None
        if text.isascii() and text.isdigit():
            found = cls("even", int(text), int(text))
        elif match := _RANGE.fullmatch(text):
            found = cls("even", int(match[1]), int(match[2]))
        elif match := _SPREAD.fullmatch(text):
            found = cls(match[1], float(match[2]), float(match[3]))
        if found is None:
            raise ConfigError(f"{option} {text!r} is not a length in tokens; write {_FORMS}.")
        if found.low < 1 or (found.kind == "even" and found.high < found.low):
            raise ConfigError(f"{option} {text!r} must be at least 1 token, the lower bound first.")
        return found

    def draw(self, random: Random) -> int:
        """At least 1."""
        if self.kind == "even":
            return random.randint(int(self.low), int(self.high))
        mean, variation = self.low, self.high
        if self.kind == "normal":
            return max(1, round(random.gauss(mean, mean * variation)))
        sigma = math.sqrt(math.log(1 + variation**2))
        return max(1, round(random.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    @property
    def most(self) -> int:
        """The longest that is usual: nothing, or one in a thousand, is longer."""
        if self.kind == "even":
            return int(self.high)
        mean, variation = self.low, self.high
        if self.kind == "normal":
            return round(mean * (1 + 3.1 * variation))
        sigma = math.sqrt(math.log(1 + variation**2))
        return round(mean * math.exp(3.1 * sigma - sigma**2 / 2))

    def __str__(self) -> str:
        if self.kind != "even":
            return f"{self.kind}:{self.low:g}:{self.high:g}"
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"
