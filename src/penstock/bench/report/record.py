"""A run as JSON: settings, figures of every level, and, when asked for, every single request."""

from __future__ import annotations

import datetime
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock import __version__
from penstock.bench.load.outcome import RequestOutcome, RequestTiming
from penstock.bench.run.figures import BUSY, LATE_S, Figures, Spread
from penstock.bench.run.session import Result

FORMAT = 1
_LATENCIES = ("ttft", "ttft_later_turns", "itl", "tpot", "e2e")


def to_json(result: Result) -> dict[str, Any]:
    """Readable without this package. Latencies in milliseconds. Without the API key."""
    options = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(result.settings.options).items()}
    options = {**options, "url": result.settings.target.url}  # an address may hold a password
    del options["api_key"]
    return {
        "format": FORMAT,
        "penstock": __version__,
        "begun_at": datetime.datetime.fromtimestamp(result.begun_at, datetime.UTC).isoformat(
            timespec="seconds"
        ),
        "target": result.settings.target.url,
        "endpoint": result.work.form.path,
        "model": result.work.form.model,
        "options": options,
        "notes": list(result.notes),
        "levels": [_level(figures) for figures in result.figures],
    }


def write_records(result: Result, path: Path) -> None:
    """A line for each request: when, how long, how many, what became of it."""
    with path.open("w") as file:
        for figures, measured in result.levels:
            for outcome in sorted(measured.outcomes, key=lambda outcome: outcome.due):
                line = {"level": figures.level.title, **_request(outcome, measured.start)}
                file.write(json.dumps(line) + "\n")


def _level(figures: Figures) -> dict[str, Any]:
    level, strain = figures.level, figures.strain
    return {
        "load": level.title,
        "concurrency": level.concurrency,
        "rate": level.rate,
        "warmup_s": level.warmup_s,
        "seconds": figures.seconds,
        "stopped_early": figures.stopped,
        "requests": {"good": figures.good, "failed": figures.failed, "unfinished": figures.unfinished},
        "requests_per_s": figures.requests_per_s,
        "input_tokens_per_s": figures.input_tokens_per_s,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "tokens_per_event": figures.tokens_per_event,
        "tokens_counted_by": figures.counted_by,
        "cached_share": figures.cached,
        "prompt_tokens": _spread(figures.prompt_tokens),
        "completion_tokens": _spread(figures.completion_tokens),
        **{f"{name}_ms": _spread(getattr(figures, name), 1e3) for name in _LATENCIES},
        "goodput_per_s": figures.goodput,
        "kept_slo": figures.kept,
        "failures": [asdict(failure) for failure in figures.failures],
        "client": {
            "workers": strain.workers,
            "cpu": strain.cpu,
            "machine_cpu": strain.machine_cpu,
            "loop_late_ms": _spread(strain.lag_s, 1e3),
            "sent_late_ms": _spread(strain.late_s, 1e3),
            "was_bottleneck": strain.cpu > BUSY,
            "waited_for_a_core": strain.lag_s is not None and strain.lag_s.p99 > LATE_S,
        },
    }


def _spread(spread: Spread | None, scale: float = 1.0) -> dict[str, float] | None:
    if spread is None:
        return None
    return {name: value if name == "count" else value * scale for name, value in asdict(spread).items()}


def _request(outcome: RequestOutcome, start: float) -> dict[str, Any]:
    timing = RequestTiming.of(outcome) if outcome.good else None
    return {
        "due_s": outcome.due - start,
        "sent_s": outcome.sent - start,
        "counted": outcome.counted,
        "turn": outcome.turn,
        "error": outcome.error or None,
        "detail": outcome.detail or None,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "asked_tokens": outcome.asked_tokens,
        "completion_tokens": outcome.completion_tokens,
        "events": outcome.event_count(),
        "ttft_ms": 1e3 * timing.ttft if timing else None,
        "tpot_ms": 1e3 * timing.tpot if timing and timing.tpot is not None else None,
        "e2e_ms": 1e3 * (outcome.ended - outcome.due),
        "gaps_ms": [round(1e3 * (later - earlier), 3) for earlier, later in pairwise(outcome.times())],
    }
