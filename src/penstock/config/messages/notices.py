"""What users should know of their config although it is no fault: logged once in a process."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger(__name__)


@functools.cache
def warn_once(text: str) -> None:
    """Logs `text` as a warning, the first time that it is given."""
    log.warning("%s", text)
