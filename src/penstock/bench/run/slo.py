"""What a user calls good enough: `ttft=200ms,itl=30ms,tpot=25ms,e2e=5s`."""

import math
import re
from dataclasses import dataclass
from typing import Self

from penstock.bench.load.outcome import RequestTiming
from penstock.errors import ConfigError

NAMES = ("ttft", "itl", "tpot", "e2e")
_TARGET = re.compile(r"(\w+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)")
_GAPS_WITHIN = 0.99


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits in seconds; a request must keep all of them. itl: 99 % of the request's gaps."""

    limits: tuple[tuple[str, float], ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises: ConfigError."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = _TARGET.fullmatch(part.strip())
            if match is None or match[1] not in NAMES:
                raise ConfigError(
                    f"--slo {part.strip()!r} is not a target; write name=limit with a unit, like "
                    f"ttft=200ms,itl=30ms. Names are {', '.join(NAMES)}."
                )
            limits[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
        return cls(tuple(limits.items()), text)

    def kept(self, timing: RequestTiming) -> bool:
        """Whether a complete answer kept every limit. An answer of one token has no gap to be too long."""
        gaps = sorted(timing.gaps)
        itl = gaps[math.ceil(_GAPS_WITHIN * len(gaps)) - 1] if gaps else 0.0
        took = {"ttft": timing.ttft, "itl": itl, "tpot": timing.tpot or 0.0, "e2e": timing.e2e}
        return all(took[name] <= limit for name, limit in self.limits)
