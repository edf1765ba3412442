"""One model, divided between its layers, says what it says on one worker."""

from __future__ import annotations

import pytest
from workers import two_workers_answer_as_one

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S24"), pytest.mark.full]


async def test_two_workers_answer_as_one():
    """An engine of its own: the others have one worker each."""
    await two_workers_answer_as_one("pipeline_parallel_size")
