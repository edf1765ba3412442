"""A fleet that follows its file, as by `penstock serve --watch`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from penstock.config.fleet.document import Document, StartSettings
from penstock.config.loading.watched_files import WatchedFiles
from penstock.errors import Error, Unavailable

_LOOK_S = 0.5
_ANSWER_S = 120.0


class Control:
    """Calls of an application's control that concern its file, from a thread that may wait."""

    def __init__(self, app: str, who: str) -> None:
        """who: for the history."""
        self._app, self._who = app, who

    def record(self, start: StartSettings, fleet: Document, deployments: Mapping[str, str | None]) -> None:
        """Says what runs, see `LLMControl.record`. Raises: Unavailable."""
        self._call("record", asdict(start), fleet, self._who, dict(deployments))

    def save(self, fleet: Document) -> str:
        """See `LLMControl.save`. Raises: Unavailable."""
        return self._call("save", fleet, self._who)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            handle = serve.get_deployment_handle("LLMControl", app_name=self._app)
            return getattr(handle, method).remote(*arguments).result(timeout_s=_ANSWER_S)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unavailable(f"Control does not answer, and is asked again: {error}") from error


def follow(
    files: WatchedFiles,
    read_them: Callable[[], Document],
    save: Callable[[Document], str],
    say: Callable[[str], None],
    stopped: threading.Event,
) -> None:
    """Has control apply the files each time they are saved, until `stopped`."""
    is_late = False
    while not stopped.wait(_LOOK_S):
        if not (files.saved() or is_late):
            continue
        was_late, is_late = is_late, False
        try:
            files.look()
            said = save(read_them())
        except Unavailable as error:
            is_late, said = True, "" if was_late else str(error)
        except Error as error:
            said = f"Nothing changes: {error}"
        if said:
            say(said)
