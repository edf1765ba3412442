"""What downloads have left on this machine: models of the hub, and folders from buckets and URLs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from penstock.config import Settings
from penstock.errors import Unavailable
from penstock.sources.cache import is_used


@dataclass(frozen=True, slots=True)
class Download:
    """One model or adapter. used: the last time, in seconds since 1970. hub: in the hub client's cache."""

    name: str
    size_bytes: int
    used: float
    folder: Path
    hub: bool

    def remove(self) -> None:
        """Raises: Unavailable while a process uses it."""
        if any(is_used(version) for version in self.folder.iterdir() if version.is_dir()):
            raise Unavailable(f"{self.name} is in use. End what serves it first.")
        shutil.rmtree(self.folder)


def cached() -> list[Download]:
    """The largest first."""
    return sorted((*_of_hub(), *_of_sources()), key=lambda one: -one.size_bytes)


def _of_hub() -> list[Download]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return [
        Download(one.repo_id, one.size_on_disk, one.last_accessed, one.repo_path, hub=True) for one in found
    ]


def _of_sources() -> list[Download]:
    folder = Settings.read().cache_folder() / "sources"
    found: list[Download] = []
    for one in folder.iterdir() if folder.is_dir() else ():
        files = [path for path in one.rglob("*") if path.is_file()]
        used = max((version.stat().st_mtime for version in one.iterdir()), default=0.0)
        name = one.name.rpartition("-")[0].replace("--", "/")
        found.append(Download(name, sum(path.stat().st_size for path in files), used, one, hub=False))
    return found
