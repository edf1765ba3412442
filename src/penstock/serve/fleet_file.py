"""Follows the file of a fleet, for `penstock serve --watch` and on KubeRay.

KubeRay deploys an application again when anyone else has changed it, as control does. So KubeRay deploys
`FleetFile` alone, which deploys the fleet as another application.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from penstock import json_logs
from penstock.config.fleet.document import Document, StartSettings, read
from penstock.config.loading.watched_files import WatchedFiles
from penstock.errors import Error, Unavailable, reason
from penstock.serve.builders import build_openai_app
from penstock.serve.control import application
from penstock.serve.replica.version import built

log = logging.getLogger(__name__)

_LOOK_S = 0.5
_ASK_AGAIN_S = 5.0
_DEPLOY_AGAIN_S = 60.0
_ANSWER_S = 400.0  # vLLM may take three minutes to check the arguments of a model


class Control:
    """Calls of an application's control that concern its file, from a thread that may wait."""

    def __init__(self, app: str, who: str) -> None:
        """who: for the history."""
        self._app, self._who = app, who

    def record(self, start: StartSettings, fleet: Document, deployments: Mapping[str, str | None]) -> None:
        """Says what runs, see `LLMControl.record`. Raises: Unavailable."""
        self._call("record", asdict(start), fleet, self._who, dict(deployments))

    def save(self, fleet: Document, changed_only: bool = False) -> str:
        """See `LLMControl.save`. Raises: Unavailable."""
        return self._call("save", fleet, self._who, changed_only)

    def note(self, text: str) -> None:
        """Adds to the audit log. Raises: Unavailable."""
        self._call("note", self._who, text)

    def is_recorded(self) -> bool:
        """Whether it knows what runs. Raises: Unavailable."""
        return bool(self._call("history")["data"])

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            handle = serve.get_deployment_handle("LLMControl", app_name=self._app)
            return getattr(handle, method).remote(*arguments).result(timeout_s=_ANSWER_S)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unavailable(f"Control does not answer: {reason(str(error))}") from error


def follow(
    files: WatchedFiles,
    read_them: Callable[[], Document],
    save: Callable[[Document, bool], str],
    say: Callable[[str], None],
    stopped: threading.Event,
    *,
    is_late: bool = False,
) -> None:
    """Has control apply the files each time they are saved, until `stopped`. is_late: at once, too.

    save: gets the fleet, and whether it may have had it already, as no answer came.
    """
    pause_s = _LOOK_S
    while not stopped.wait(pause_s):
        if not (files.saved() or is_late):
            continue
        was_late, is_late, pause_s = is_late, False, _LOOK_S
        try:
            files.look()
            said = save(read_them(), was_late)
        except Unavailable as error:
            is_late, pause_s, said = True, _ASK_AGAIN_S, "" if was_late else f"{error} It is asked again."
        except Error as error:
            said = f"Nothing changes: {error}"
        except Exception as error:  # what runs must not end with a file that nobody has thought of
            log.exception("A file that was saved cannot be applied")
            said = f"Nothing changes: A fault of Penstock itself ({type(error).__name__}: {error})."
        if said:
            say(said)


class FleetFile:
    """Deploys the fleet of a file under the name `app`, and follows the file. Ready when the fleet runs."""

    async def __init__(self, file: str, gateway: Mapping[str, Any], app: str = "penstock") -> None:
        """gateway: wins over the file's."""
        json_logs.configure()
        self._file, self._app, self._start = file, app, StartSettings(gateway, in_pods=True)
        self._control = Control(app, file)
        self._files = WatchedFiles([file])
        self._deployed: tuple[Document, dict[str, str | None]] | None = None
        while not await asyncio.to_thread(self._is_there):
            pass
        self._following = threading.Thread(target=self._follow, name="fleet-file", daemon=True)
        self._following.start()

    def check_health(self) -> None:
        """Serve's hook."""
        if not self._following.is_alive():
            raise RuntimeError("Nothing follows the file any more.")

    def _is_there(self) -> bool:
        """Whether the fleet runs and control knows it; deploys it where not. To be called until it is."""
        try:
            return (self._deployed is None and self._runs()) or self._deploy()
        except (Unavailable, RayError, RayServeException) as error:
            log.warning("%s", error)
            time.sleep(_ASK_AGAIN_S)
            return False

    def _runs(self) -> bool:
        """Whether it has been deployed, and control knows it. Raises: Unavailable."""
        try:
            status, _ = application.state(self._app)
        except (RayError, RayServeException) as error:
            raise Unavailable(f"Ray Serve does not answer: {reason(str(error))}") from error
        return status != "NOT_STARTED" and self._control.is_recorded()

    def _deploy(self) -> bool:
        """Deploys what the file says. Returns when it runs; or False, to be called again, once the file has
        been saved or a while after a failure.
        """
        self._files.look()
        again_at = math.inf
        try:
            fleet = read(self._file)
            args = self._start.applied(fleet)
            with built() as versions:
                app = build_openai_app(args)
            application.deploy(app, self._app, args.gateway.log_format)
            self._deployed = fleet, versions
        except Exception as error:  # Serve's and Ray's, too, of many kinds
            again_at = time.monotonic() + _DEPLOY_AGAIN_S
            log.exception("The file is not deployed, and is tried again: %s", error)
        while not self._files.saved() and time.monotonic() < again_at:
            time.sleep(_LOOK_S)
            status = application.state(self._app)[0]
            if self._deployed and status == "RUNNING":
                self._control.record(self._start, *self._deployed)
                return True
            if status == "DEPLOY_FAILED":
                again_at = min(again_at, time.monotonic() + _DEPLOY_AGAIN_S)
        return False

    def _follow(self) -> None:
        """What has been saved since an earlier replica has ended is applied at once."""
        never = threading.Event()
        follow(self._files, self._read, self._save, log.warning, never, is_late=True)

    def _read(self) -> Document:
        try:
            return read(self._file)
        except Error as error:
            if Path(self._file).exists():  # else it is meant for other pods now
                self._control.note(f"Nothing changes: {error}")
            raise

    def _save(self, fleet: Document, _may_have_it: bool) -> str:
        if not self._runs():  # it was deleted, or control began anew without its disk
            self._deployed = None  # since then others may have been applied
            while not self._is_there():
                pass
            fleet = self._read()  # it may have been saved meanwhile
        # Unlike a person, a kubelet writes a file again that says the same.
        return self._control.save(fleet, changed_only=True)


def build_fleet_file(args: Mapping[str, Any]) -> serve.Application:
    """The application of a `FleetFile` with these arguments."""
    follower: Any = serve.deployment(FleetFile)
    return follower.bind(**args)
