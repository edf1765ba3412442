"""vLLM's hook for the scheduler's statistics. Importing this file imports vLLM."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from penstock.engine import p99_lately
from penstock.engines.vllm.frontend.load import Scheduled


class SchedulerLogger(StatLoggerBase):
    """Stores the last numbers in `latest`."""

    def __init__(self, latest: Scheduled) -> None:
        self._latest = latest
        self._stepped_at = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        now = time.monotonic()
        if self._latest.running:  # else the engine has rested since
            self._latest.step_s = p99_lately(self._latest.step_s, now - self._stepped_at)
        self._stepped_at = now
        self._latest.steps += 1
        self._latest.running = scheduler_stats.num_running_reqs
        self._latest.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._latest.kv_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Logs nothing."""
