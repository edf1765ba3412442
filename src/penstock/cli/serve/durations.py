"""How long each phase of each part of a start took the last time: kept for the user, in the cache folder."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.config import Settings

Durations = Mapping[str, Mapping[str, float]]
"""Seconds by part and phase."""

_MOST = 200  # parts


def last() -> Durations:
    """Of the last start in which each part was; empty where nothing can be read."""
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, dict[str, float]])
    return {}


def remember(found: Durations) -> None:
    """Keeps these; of parts that are not in them, what was kept before. Writes whole or not at all."""
    kept = {part: phases for part, phases in last().items() if part not in found} | dict(found)
    file, draft = _file(), _file().with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(dict(list(kept.items())[-_MOST:])))
        draft.replace(file)


def _file() -> Path:
    return Settings.read().cache_folder() / "starts.json"
