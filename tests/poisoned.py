"""A simulated engine that some rows kill, as a crash inside a real one would."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from penstock.engine import Delta, Prompt
from penstock.engines.sim.engine import SimEngine

POISON = "poison"


class Poisoned(SimEngine):
    """Dies when it is asked for "poison"."""

    async def generate(self, prompt: Prompt, params: Any, **options: Any) -> AsyncGenerator[Delta, None]:
        if POISON in str(prompt):
            self.die("A row killed the engine.")
        async with aclosing(super().generate(prompt, params, **options)) as deltas:
            async for delta in deltas:
                yield delta
