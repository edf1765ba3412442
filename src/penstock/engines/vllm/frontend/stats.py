"""vLLM's hook for the scheduler's statistics. Importing this file imports vLLM."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.engine import p99_lately


class SchedulerLogger(StatLoggerBase):
    """The last numbers. Units: requests; kv_usage as a share from 0 to 1. steps: number of reports so far.
    step_s: as in `Load`.
    """

    def __init__(self) -> None:
        self.steps = self.running = self.waiting = 0
        self.kv_usage = self.step_s = self._stepped_at = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        now = time.monotonic()
        if self.running:  # else the engine has rested since
            self.step_s = p99_lately(self.step_s, now - self._stepped_at)
        self._stepped_at = now
        self.steps += 1
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Logs nothing."""
