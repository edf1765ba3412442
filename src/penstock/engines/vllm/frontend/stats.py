"""The scheduler's statistics after its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase


@dataclass(slots=True)
class Scheduled:
    """Units: requests; kv_usage as a share from 0 to 1. steps: number of reports so far."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class SchedulerLogger(StatLoggerBase):
    """vLLM's hook for custom statistics: stores the last numbers in `latest`."""

    def __init__(self, latest: Scheduled) -> None:
        self._latest = latest

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is None:
            return
        self._latest.steps += 1
        self._latest.running = scheduler_stats.num_running_reqs
        self._latest.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self._latest.kv_usage = scheduler_stats.kv_cache_usage

    def log_engine_initialized(self) -> None:
        """Logs nothing."""
