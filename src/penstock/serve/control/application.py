"""Serve's calls, for a process that makes them in several threads."""

from __future__ import annotations

import threading
from typing import Any

from ray import serve

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


def state(name: str) -> tuple[str, list[str]]:
    """The status of one ("DEPLOYING", "RUNNING", "DEPLOY_FAILED", ...), and why."""
    if (application := known().get(name)) is None:
        return "NOT_STARTED", []
    messages = [application.message, *(one.message for one in application.deployments.values())]
    return application.status.value, [text for text in messages if text]
