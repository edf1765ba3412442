"""Arrivals and lengths as some service once had them, from a file.

JSON lines or CSV, a request a line. Known names of columns, whatever their case: Mooncake's `timestamp`
(milliseconds), `input_length`, `output_length`, `hash_ids`; Azure's `TIMESTAMP` (dates), `ContextTokens`,
`GeneratedTokens`; BurstGPT's `Timestamp` (seconds), `Request tokens`, `Response tokens`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

HASH_BLOCK_TOKENS = 512  # Mooncake: every id stands for so many tokens of the prompt

_TIME = ("timestamp", "time", "arrival", "arrived_at")
_INPUT = ("input_length", "contexttokens", "request tokens", "prompt_tokens", "input_tokens", "input")
_OUTPUT = (
    "output_length",
    "generatedtokens",
    "response tokens",
    "completion_tokens",
    "output_tokens",
    "output",
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. at_s: since the first one. blocks: names of what its prompt is made of."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, *, speed: float = 1.0) -> tuple[Arrival, ...]:
    """In the order of time, from second 0 on, `speed` times as fast. Raises: ConfigError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read ({error}).") from error
    found: list[Arrival] = []
    try:
        for row in _rows(path, lines):
            found.append(_arrival({key.strip().lower(): value for key, value in row.items() if key}))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path}: request {len(found) + 1} cannot be used ({error}); a row needs a "
            "timestamp, input_length and output_length (see docs/operate/bench.md)."
        ) from error
    if not found:
        raise ConfigError(f"The trace {path} holds no request.")
    found.sort(key=lambda arrival: arrival.at_s)
    first = found[0].at_s
    return tuple(
        Arrival((one.at_s - first) / speed, one.input_tokens, one.output_tokens, one.blocks) for one in found
    )


def _rows(path: Path, lines: list[str]) -> Iterable[Mapping[str, Any]]:
    if path.suffix == ".csv":
        return csv.DictReader(lines)
    return (json.loads(line) for line in lines if line.strip())


def _arrival(row: Mapping[str, Any]) -> Arrival:
    blocks = tuple(int(name) for name in row.get("hash_ids") or ())
    scale = 1e-3 if "hash_ids" in row else 1.0
    tokens = int(_of(row, _INPUT)), max(1, int(_of(row, _OUTPUT)))
    if tokens[0] < 0:
        raise ValueError(f"a length of {tokens[0]}")
    return Arrival(_seconds(_of(row, _TIME)) * scale, max(1, tokens[0]), tokens[1], blocks)


def _of(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise KeyError(f"no column {next(iter(names))}")


def _seconds(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        # Azure's dates have seven digits after the point, one more than Python reads.
        whole, _, fraction = str(value).strip().removesuffix("Z").partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{fraction.partition('+')[0] or 0}")
