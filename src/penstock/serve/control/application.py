"""Serve's calls, for a process that makes them in several threads."""

from __future__ import annotations

import re
import threading
from typing import Any

from ray import serve

_NAMES_THEM = re.compile(r"(Failed to update t|T)he deployments \[")

turn = threading.RLock()
"""Held while Serve reads or makes configs of deployments, which two threads must not do at once: each
registers a module with Ray's cloudpickle for a moment, and fails if another one has removed it.
"""


def deploy(application: serve.Application, name: str, log_format: str) -> None:
    """Hands it to Serve, whose own logs are then in that format, and returns."""
    logging = {"encoding": log_format.upper()}
    target = serve.RunTarget(application, name=name, route_prefix=None, logging_config=logging)
    with turn:
        serve.run_many([target], wait_for_applications_running=False)


def known() -> dict[str, Any]:
    """Serve's status of each application."""
    with turn:
        return dict(serve.status().applications)


def state(name: str) -> tuple[str, dict[str, str]]:
    """The status of one ("DEPLOYING", "RUNNING", "DEPLOY_FAILED", ...), and why, by deployment; under "" what
    Serve says of the application, unless it only names deployments.
    """
    if (application := known().get(name)) is None:
        return "NOT_STARTED", {}
    why = {name: one.message for name, one in application.deployments.items() if one.message}
    if application.message and not (why and _NAMES_THEM.match(application.message)):
        why = {"": application.message, **why}
    return application.status.value, why
