"""The load of one engine: its open requests, and the scheduler's numbers after its last step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.engine import Load

if TYPE_CHECKING:
    from penstock.engines.vllm.frontend.gated_llm import GatedLLM
    from penstock.engines.vllm.frontend.stats import SchedulerLogger

_COUNTED_S = 0.02


class LoadReader:
    """Unfinished requests are counted; how many of them wait comes from the last scheduler step."""

    def __init__(self, llm: GatedLLM, scheduled: SchedulerLogger | None) -> None:
        """scheduled: None when vLLM's scheduler does not report."""
        self._llm = llm
        self._scheduled = scheduled
        self._seats: int = llm.vllm_config.scheduler_config.max_num_seqs
        self._queued_tokens = 0
        self._counted_until = 0.0

    def read(self) -> Load:
        unfinished, held = self._llm.get_num_unfinished_requests(), self._llm.held
        if self._scheduled is None:
            return Load(unfinished, held, seats=self._seats)
        waiting = min(self._scheduled.waiting, unfinished)
        running = unfinished - waiting
        kv_usage = self._scheduled.kv_usage if unfinished else 0.0
        unseen = max(0, running - self._scheduled.running)
        step_s = self._scheduled.step_s
        return Load(running, waiting + held, self._tokens(), kv_usage, unseen, step_s, self._seats)

    def _tokens(self) -> int:
        """Of queued prompts; recounted only when the last count is old: a count visits every request."""
        if (now := time.monotonic()) >= self._counted_until:
            self._queued_tokens, self._counted_until = self._llm.get_num_queued_tokens(), now + _COUNTED_S
        return self._queued_tokens
