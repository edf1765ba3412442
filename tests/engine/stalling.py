"""A worker extension whose engines stall: for as long as is asked, or for ever."""

from __future__ import annotations

import threading
import time
from typing import Any


class Stalling:
    """Named in `engine_kwargs` as `stalling.Stalling`."""

    execute_model: Any

    def wait_for_trainer(self, seconds: float) -> str:
        time.sleep(seconds)  # as torch's store waits: without CPU time
        return "joined"

    def hang(self) -> None:
        """From the next step on."""
        self.execute_model = lambda *_, **__: threading.Event().wait()
