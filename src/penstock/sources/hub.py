"""A repository of the Hugging Face Hub, or a folder in it: `org/name`, `org/name/folder`, `org/name@tag`.

Files lie in the hub client's own cache, which other programs share: it is resumable, and locks each file.
"""

from __future__ import annotations

import glob
import logging
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.sources.protocol import Count, File, FileSource, within

log = logging.getLogger(__name__)

_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*){0,}(@[\w./-]+)?")
_FAST, _FORMER = "HF_XET_HIGH_PERFORMANCE", "HF_HUB_ENABLE_HF_TRANSFER"
_WORKERS = 8


def is_hub_id(source: str) -> bool:
    return _ID.fullmatch(source) is not None


def use_fast_transfers(environment: Any = os.environ) -> None:
    """Gives the former switch of fast downloads its effect; call it before the hub's client is imported."""
    if environment.get(_FORMER, "").lower() in ("1", "true", "yes", "on"):
        del environment[_FORMER]  # the client would warn that it does nothing
        if environment.setdefault(_FAST, "1") == "1":
            log.warning("%s has no effect in today's hub client; %s=1 is set in its place.", _FORMER, _FAST)


class Hub(FileSource):
    """Files of one revision."""

    def __init__(self, source: str) -> None:
        use_fast_transfers()
        name, _, revision = source.removeprefix("hf://").partition("@")
        parts = name.split("/")
        self.shown = source
        self.repository = "/".join(parts[:2])
        self.folder = "/".join(parts[2:])
        self.revision = revision or None
        self._below = f"{self.folder}/" if self.folder else ""

    def files(self) -> list[File]:
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        info = api.model_info(self.repository, revision=self.revision, files_metadata=True)
        return sorted(
            File(name.removeprefix(self._below), entry.size or 0, entry.blob_id or info.sha or "")
            for entry in info.siblings or ()
            if (name := entry.rfilename).startswith(self._below)
        )

    def children(self, holding: str) -> list[str]:
        return within(self.files(), holding)

    def copy(self, file: File, to: Path, start: int, end: int, count: Count) -> None:
        """By way of the hub client's cache."""
        from huggingface_hub import hf_hub_download

        here = hf_hub_download(
            self.repository,
            f"{self._below}{file.name}",
            revision=self.revision,
            endpoint=os.environ.get("HF_ENDPOINT"),
            tqdm_class=_bar(count),
        )
        shutil.copyfile(here, to)

    def cached(self, choose: Callable[[list[str]], Sequence[str]]) -> Path:
        """The latest download, if it has all chosen files. Does not use the network.

        Raises: LocalEntryNotFoundError.
        """
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            tree = get_cached_repo_tree(self.repository, revision=self.revision)
        except CachedRepoTreeNotFoundError:  # from another program, or an older client: all that is there
            return self._snapshot(None, local_files_only=True)
        names = [entry.path.removeprefix(self._below) for entry in tree if entry.path.startswith(self._below)]
        return self._snapshot(choose(names), local_files_only=True)

    def download(self, names: Sequence[str], count: Count) -> Path:
        """Those files, in a folder of the hub client's cache."""
        return self._snapshot(names, tqdm_class=_bar(count))

    def _snapshot(self, names: Sequence[str] | None, **options: Any) -> Path:
        from huggingface_hub import snapshot_download

        folder = snapshot_download(
            self.repository,
            revision=self.revision,
            allow_patterns=None if names is None else [f"{self._below}{glob.escape(name)}" for name in names],
            endpoint=os.environ.get("HF_ENDPOINT"),
            max_workers=_WORKERS,
            **options,
        )
        return Path(folder) / self.folder


def _bar(count: Count) -> Any:
    """The client's progress bars, drawn nowhere: bytes go to `count`."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self, *args: Any, **options: Any) -> None:
            self._bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._bytes and n:
                count(int(n))
            return super().update(n)

    return Bar
