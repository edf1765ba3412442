"""Sources of a model's adapters: the names available, and each one's files on this node."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock import sources
from penstock.config import LLMConfig
from penstock.config.schema.sections import ADAPTER_NAME, LoraConfig
from penstock.errors import DownloadFailed, Error, ModelNotFound, SourceNotFound

log = logging.getLogger(__name__)

_CONFIG = "adapter_config.json"  # in the folder of each adapter
_NAMED = 20  # names listed in an error
_NAMES_KEPT_S, _NAMES_WAIT_S = 5.0, 3.0
"""Requests for unknown names neither list the source each time nor occupy a download thread."""
_FETCHES, _LOOKS = 16, 8
"""Threads. Dedicated: downloads that hang must not block what else uses the loop's threads."""


class Downloader(Protocol):
    """The interface of a class given as `LLMServer(model_downloader=...)`."""

    def __init__(self, *, download_timeout_s: float | None, max_tries: int) -> None: ...

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Any:
        """The folder on this node that holds adapter `MODEL_ID:NAME`, or an object with it as `local_path`.

        May block, or be a coroutine function. An optional method `stamp` of the same arguments returns a text
        that changes with the adapter; without it nothing is refreshed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Brought:
    """An adapter on this node, and what changes when its source does."""

    local_path: Path
    stamp: str


class AdapterDownloader:
    """The default: downloads from the sources in `lora_config`."""

    def __init__(self, *, download_timeout_s: float | None = None, max_tries: int = 3) -> None:
        self._timeout_s = download_timeout_s
        self._tries = max_tries

    def load_model_from_config(self, lora_model_id: str, llm_config: LLMConfig) -> Any:
        """Returns a `Brought`. Raises: SourceNotFound, DownloadFailed."""
        source = _source(lora_model_id, llm_config)
        return Brought(*sources.fetch_with_version(source, timeout_s=self._timeout_s, tries=self._tries))

    def stamp(self, lora_model_id: str, llm_config: LLMConfig) -> str:
        """Changes when any file of the adapter does. Raises: SourceNotFound, DownloadFailed."""
        return sources.version_of(_source(lora_model_id, llm_config))


class Source:
    """The adapters of one model."""

    def __init__(self, config: LLMConfig, downloader: type[Downloader] | None = None) -> None:
        """config: one with a `lora_config`."""
        self._kind = downloader or AdapterDownloader
        self._configure(config)
        self._fetching = ThreadPoolExecutor(_FETCHES, "adapter-fetch")
        self._looking = ThreadPoolExecutor(_LOOKS, "adapter-look")
        self._naming = ThreadPoolExecutor(1, "adapter-names")
        self._listing = asyncio.Lock()

    def _configure(self, config: LLMConfig) -> None:
        assert config.lora_config is not None
        self._config, self.lora = config, config.lora_config
        self._downloader = self._kind(
            download_timeout_s=self.lora.download_timeout_s, max_tries=self.lora.max_download_tries
        )
        self._stamp = getattr(self._downloader, "stamp", None)
        self._listed: tuple[float, list[str]] = (0.0, [])

    def changed(self, lora: LoraConfig) -> Source:
        """The same model's by another config, with the same threads: `close` one of them."""
        other = copy.copy(self)
        other._configure(self._config.model_copy(update={"lora_config": lora}))
        return other

    def origin(self, name: str) -> str:
        """Where an adapter comes from; "" where only the downloader knows, and for one that is nowhere."""
        try:
            return _source(name, self._config)
        except SourceNotFound:
            return ""

    async def fetch(self, name: str) -> tuple[Path, str | None]:
        """Its folder and its stamp. Raises: ModelNotFound with the names available, DownloadFailed."""
        own = type(self._downloader).load_model_from_config is not AdapterDownloader.load_model_from_config
        before = await self.stamp(name) if own or name not in (await self._known() or ()) else None
        found = await self._ask(self._fetching, self._downloader.load_model_from_config, name)
        return Path(getattr(found, "local_path", found)), getattr(found, "stamp", before)

    async def stamp(self, name: str) -> str | None:
        """Changes with its files; None when that cannot be known. Raises: ModelNotFound, DownloadFailed."""
        return None if self._stamp is None else await self._ask(self._looking, self._stamp, name)

    async def names(self) -> list[str]:
        """All names available, sorted. Raises: SourceNotFound, DownloadFailed."""
        found = set(self.lora.adapters)
        if self.lora.dynamic_lora_loading_path is not None:
            children = functools.partial(sources.children, self.lora.dynamic_lora_loading_path, _CONFIG)
            found |= set(await _in(self._naming, children))
        return sorted(name for name in found if re.fullmatch(ADAPTER_NAME, name))

    async def check_listing(self) -> None:
        """Logs a warning if the adapters cannot be listed, and if there are none."""
        if self.lora.dynamic_lora_loading_path is None:
            return  # a downloader may know others
        if await self._known() == []:
            log.warning("Model '%s' has no adapters yet: its source is empty.", self._config.model_id)

    def close(self) -> None:
        """Does not wait for downloads."""
        for threads in (self._fetching, self._looking, self._naming):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _ask(self, threads: ThreadPoolExecutor, method: Any, name: str) -> Any:
        """Calls a downloader's method and translates its errors."""
        if not re.fullmatch(ADAPTER_NAME, name):
            raise await self._not_found(name)
        arguments = {"lora_model_id": f"{self._config.model_id}:{name}", "llm_config": self._config}
        try:
            answer = await _in(threads, functools.partial(method, **arguments))
            return await answer if inspect.isawaitable(answer) else answer
        except SourceNotFound as error:
            raise await self._not_found(name) from error
        except Error:
            raise
        except Exception as error:
            why = f"the downloader failed with {type(error).__name__}, see the log"
            raise DownloadFailed(f"The adapter '{name}' could not be fetched: {why}.") from error

    async def _not_found(self, name: str) -> ModelNotFound:
        base = f"Model '{self._config.model_id}' has no adapter '{name[:200]}'"
        if (listed := await self._known()) is None:
            return ModelNotFound(f"{base}; its adapters cannot be listed now.", param="model")
        names = [one for one in listed if one != name]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        known = ", ".join(f"'{one}'" for one in names[:_NAMED]) or "none"
        return ModelNotFound(f"{base}. There are: {known}{more}.", param="model")

    async def _known(self) -> list[str] | None:
        """Names, at most a few seconds old; None, with a warning, where they cannot be listed."""
        try:
            async with asyncio.timeout(_NAMES_WAIT_S), self._listing:
                if time.monotonic() >= self._listed[0]:
                    names = await self.names()
                    self._listed = time.monotonic() + _NAMES_KEPT_S, names
                return self._listed[1]
        except (Error, TimeoutError) as error:
            log.warning("The adapters of '%s' cannot be listed: %s", self._config.model_id, error)
            return None


async def _in(threads: ThreadPoolExecutor, call: Callable[[], Any]) -> Any:
    """Runs `call` in a thread, with the caller's context."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(threads, context.run, call)


def _source(lora_model_id: str, config: LLMConfig) -> str:
    lora, name = config.lora_config, lora_model_id.removeprefix(f"{config.model_id}:")
    if lora is not None and name in lora.adapters:
        return lora.adapters[name]
    if lora is None or lora.dynamic_lora_loading_path is None:
        raise SourceNotFound(f"No source is configured for the adapter '{name}'.")
    return f"{lora.dynamic_lora_loading_path.rstrip('/')}/{name}"
