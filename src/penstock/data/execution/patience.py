"""How often, and for how long, a row is tried. A value that the window obeys."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits of one row, and of the job while nothing answers.

    attempts: answers that may be others next time (5xx but 503), the last of them is the row's end.
    deaths: of engines with this row in them; then it is put aside as poison. At least 2.
    deadline_s: from its first try on, all its tries together; None for no limit.
    outage_s: with no engine reached, or every request refused for now (429, 503), until the job stops; its
    rows stay as they are. A row that alone is refused for so long has failed.
    """

    attempts: int = 3
    deaths: int = 3
    deadline_s: float | None = None
    outage_s: float = 300.0
    pause_s: float = 0.5

    def pause(self, tried: int, asked_s: float | None = None) -> float:
        """Seconds before the try after the `tried`-th one; what the other side asked for goes first."""
        if asked_s is not None:
            return min(asked_s, 10 * _LONGEST_PAUSE_S)
        return min(_LONGEST_PAUSE_S, self.pause_s * 2 ** (tried - 1)) * random.uniform(0.5, 1.0)

    def width(self, suspects: int, deaths: int) -> int:
        """How many rows may run side by side that `deaths` deaths have seen, of `suspects` at the last one.

        Narrower with each death, and one alone before the last, so that only what kills by itself is poison.
        """
        steps = self.deaths - 1
        left = max(0, steps - deaths)
        return max(1, math.ceil(suspects ** (left / steps))) if left else 1
