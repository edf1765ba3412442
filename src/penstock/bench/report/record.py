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
from penstock.bench.run.session import Result

FORMAT = 1


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
        "notes": result.notes,
        "levels": [{k: v for k, v in asdict(level).items() if k != "begin"} for level in result.figures],
    }


def write_records(result: Result, path: Path) -> None:
    """A line for each request: when, how long, how many, what became of it."""
    with path.open("w") as file:
        for figures, measured in result.levels:
            for outcome in sorted(measured.outcomes, key=lambda outcome: outcome.due):
                line = {"level": figures.load, **_request(outcome, measured.start)}
                file.write(json.dumps(line) + "\n")


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
